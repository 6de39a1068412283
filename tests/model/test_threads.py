"""One model, several threads: each gets the answers that one thread gets."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import massmerge
from models import FAMILIES, family_bundle, rows_of, text_bundle, with_options

TEXTS = [f"{a} {b} {c}" for a in ("win", "sad", "vote") for b in ("free", "team", "film") for c in ("now", "law")]


def answers(model, items, **options):
    return [(p.task, p.label, p.routing.selected, round(p.score, 4)) for p in model.predict(items, **options)]


def in_threads(call, jobs):
    """Every job in one of 8 threads that begin together."""
    gate = threading.Barrier(8)

    def run(job):
        gate.wait()
        return call(job)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(run, jobs))


def assert_alike(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a[:3] == b[:3]
        assert abs(a[3] - b[3]) < 1e-3


def test_8_threads_get_the_answers_that_one_gets(root):
    model = massmerge.load(text_bundle(root))
    expected = {text: answers(model, [text])[0] for text in TEXTS}
    fresh = massmerge.load(text_bundle(root))  # nothing is made yet: tokenizer, cores, copies of norms
    jobs = [TEXTS[i:] + TEXTS[:i] for i in range(16)]
    for job, found in zip(jobs, in_threads(lambda job: answers(fresh, job, batch_size=5), jobs), strict=True):
        assert_alike(found, [expected[text] for text in job])


@pytest.mark.parametrize("name", ["vit", "t5", "gpt2"])
def test_8_threads_get_the_features_that_one_gets(root, name):
    bundle, rows = family_bundle(root, name), rows_of(FAMILIES[name].make_inputs(8))
    expected = massmerge.load(bundle).embed(rows)
    fresh = massmerge.load(bundle)
    jobs = [[(i + j) % 8 for j in range(8)] for i in range(16)]
    for job, found in zip(jobs, in_threads(lambda job: fresh.embed([rows[i] for i in job]), jobs), strict=True):
        assert float((found - expected[job]).abs().max()) < 1e-4


def test_8_threads_with_a_cache_and_tasks_of_their_own_do_not_disturb_each_other(root, tmp_path):
    options = {"top_k": 2, "threshold": 0.0}
    bundle = with_options(family_bundle(root, "bert"), tmp_path / "bundle", router=options)
    rows = rows_of(FAMILIES["bert"].make_inputs(6))
    tasks = ["a", "b", "c", ["a", "b"], ["b", "c"], ["a", "c"], None, "a"] * 3
    plain = massmerge.load(bundle)
    expected = [answers(plain, rows, task=task) for task in tasks]
    model = massmerge.load(bundle, cache="150KB")  # room for one set or two: they drive each other out
    found = in_threads(lambda task: answers(model, rows, task=task), tasks)
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other)


def test_texts_that_are_truncated_in_one_thread_do_not_change_those_of_another(root):
    model = massmerge.load(text_bundle(root))
    reader = model.core.reader
    texts = ["win " * 700, "win " * 20] * 8
    with pytest.warns(UserWarning, match="truncated"):
        found = in_threads(lambda text: [reader.row(text)["input_ids"].shape[0] for _ in range(20)], texts)
    assert found == [[512] * 20, [22] * 20] * 8
