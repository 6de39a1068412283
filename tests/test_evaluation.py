"""Evaluations: of a constructed model whose answers are known, and of real bundles against their own experts."""

import csv
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertForSequenceClassification, ViTForImageClassification, ViTImageProcessorPil

import massmerge
from massmerge import InputError, MassError, Prediction, Routing, Suite
from massmerge.evaluation import evaluate as module
from massmerge.evaluation.prepared import prepare_evaluation
from massmerge.evaluation.run import run_stream
from models import image_bundle, text_bundle, with_options

LABELS = {"a": ("x", "y"), "b": ("x", "y", "z"), "c": ("x",)}
WORDS = "free win prize call meeting report goal team match vote law party cell gene star film song bad good sad"


class Spied:
    """A model whose answers are known; it notes how it was asked."""

    takes_images = False
    voters = ("M0.mean",)

    def __init__(self, answer=None, labels=LABELS):
        self.answer, self.calls = answer, []
        self.tasks, self.labels, self.shared_labels = list(labels), labels, []

    def stream(self, inputs, *, task=None, **options):
        assert isinstance(inputs, Iterator)  # never all of them at once
        items: list = []
        self.calls.append(SimpleNamespace(task=task, items=items, options=options))
        for item in inputs:
            items.append(item)
            if isinstance(item, Exception):
                yield Prediction(None, error=str(item))
                continue
            found, label, selected = self.answer(item, task)
            residuals = {t: -2.0 if t in selected[:1] else 1.0 for t in self.tasks}
            routing = Routing(residuals if task is None else {}, {}, list(selected), "M0.mean")
            timings = {"first pass": 4.0, "routing": 1.0, "second pass": 8.0, "heads": 2.0, "inputs": 4}
            yield Prediction(found, label, 0.9, 1.0, routing=routing, timings=timings)


def write_suite(folder, rows, **more):
    """A suite of .csv files; rows are pairs of text and label by task."""
    lines = ["tasks:"]
    for task, pairs in rows.items():
        (folder / f"{task}.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in pairs))
        lines.append(f"  {task}:\n    data: {task}.csv\n    input: text")
        lines += [f"    {key}: {value}" for key, value in more.get(task, {}).items()]
    if "shared_labels" in more:
        lines.append(f"shared_labels: {json.dumps(more['shared_labels'])}")
    (folder / "suite.yaml").write_text("\n".join(lines) + "\n")
    return folder / "suite.yaml"


def random_world(tmp_path, seed, **more):
    """Rows of two tasks, and a model that answers them at random but always the same."""
    random = np.random.default_rng(seed)
    rows = {t: [(f"{t}{i}", str(random.choice(LABELS[t]))) for i in range(n)] for t, n in (("a", 37), ("b", 61))}
    answers = {}
    for task, pairs in rows.items():
        for text, label in pairs:
            kind = random.random()
            other = str(random.choice(["a", "b", "c"]))
            if kind < 0.5:
                answers[text] = (task, label, (task,))
            elif kind < 0.9:
                answers[text] = (other, str(random.choice(LABELS[other])), (other, "c") if other != "c" else ("c",))
            else:
                answers[text] = (None, None, ())
    known = {text: str(random.choice(LABELS[text[0]])) for text in answers}

    def answer(text, task):
        return answers[text] if task is None else (task, known[text], (task,))

    return write_suite(tmp_path, rows, **more), Spied(answer), rows, answers, known


# What the model is told


def test_the_model_gets_every_input_once_shuffled_and_without_a_task(tmp_path):
    suite, model, rows, _, _ = random_world(tmp_path, 0)
    massmerge.evaluate(model, suite, oracle=False)
    (call,) = model.calls
    texts = [text for pairs in rows.values() for text, _ in pairs]
    assert sorted(call.items) == sorted(texts)
    assert call.items != texts
    owners = "".join(item[0] for item in call.items)
    assert "ab" in owners[:20] or "ba" in owners[:20]
    assert call.task is None
    assert call.options == {"route": "input", "batch_size": 32, "top": 1, "unknown": None, "on_error": "row"}


def test_the_order_of_the_stream_is_its_seeds(tmp_path):
    suite, model, *_ = random_world(tmp_path, 0)
    for seed in (0, 0, 1):
        massmerge.evaluate(model, suite, oracle=False, seed=seed)
    first, again, other = (call.items for call in model.calls)
    assert first == again != other


def test_the_stream_has_ended_before_a_task_is_named(tmp_path):
    suite, model, *_ = random_world(tmp_path, 0)
    massmerge.evaluate(model, suite)
    assert model.calls[0].task is None
    assert len(model.calls[0].items) == 98
    assert {call.task for call in model.calls[1:]} == {"a", "b"}


def test_batches_of_one_task_carry_no_name_either(tmp_path):
    suite, model, *_ = random_world(tmp_path, 0)
    massmerge.evaluate(model, suite, oracle=False, route="batch", batch_size=8)
    assert all(call.task is None and call.options["route"] == "batch" for call in model.calls)
    assert all(len({item[0] for item in call.items}) == 1 and len(call.items) <= 8 for call in model.calls)
    assert sum(len(call.items) for call in model.calls) == 98


def test_options_are_passed_on(tmp_path):
    suite, model, *_ = random_world(tmp_path, 0)
    massmerge.evaluate(model, suite, oracle=False, batch_size=5, unknown={"lift": 1.5})
    assert model.calls[0].options["batch_size"] == 5
    assert model.calls[0].options["unknown"] == {"lift": 1.5}


def test_inputs_are_taken_as_they_are_needed(tmp_path):
    suite, model, *_ = random_world(tmp_path, 0)
    ready = prepare_evaluation(model, suite)
    for data in ready.data.values():
        data.read_inputs()
    taken = []

    def watch(items, what, total):
        for item in items:
            taken.append(len(model.calls[0].items))
            yield item

    run_stream(model, ready, seed=0, route="input", batch_size=32, unknown=None, progress=watch)
    assert taken == list(range(1, 99))


# The figures


@pytest.mark.parametrize("seed", range(4))
def test_the_figures_are_those_of_obvious_loops(tmp_path, seed):
    suite, model, rows, answers, known = random_world(
        tmp_path, seed, a={"reference": 0.9}, b={"reference": 0.8}, shared_labels=[["a/x", "b/x"], ["b/y", "c/x"]]
    )
    found = massmerge.evaluate(model, suite)
    same = [{"a/x", "b/x"}, {"b/y", "c/x"}]
    strict_by_task = []
    for result in found.tasks:
        strict = shared = routed = held = right_known = abstained = 0
        for text, label in rows[result.task]:
            task, answered, selected = answers[text]
            good = task == result.task and answered == label
            strict += good
            means_same = any({f"{task}/{answered}", f"{result.task}/{label}"} <= g for g in same)
            shared += good or (task != result.task and means_same)
            routed += bool(selected) and selected[0] == result.task
            held += result.task in selected
            abstained += task is None
            # Routed to its own task alone, the answer is the same as with the task known.
            right_known += good if selected == (result.task,) else known[text] == label
        count = len(rows[result.task])
        strict_by_task.append(strict / count)
        assert result.rows == result.total == count
        assert result.strict.value == pytest.approx(strict / count)
        assert result.shared.value == pytest.approx(shared / count)
        assert result.routing.value == pytest.approx(routed / count)
        assert result.in_set.value == pytest.approx(held / count)
        assert result.known.value == pytest.approx(right_known / count)
        assert result.abstained == abstained
        reference = {"a": 0.9, "b": 0.8}[result.task]
        assert result.normalised.value == pytest.approx(strict / count / reference)
        assert result.normalised_shared.value == pytest.approx(shared / count / reference)
        assert result.normalised_known.value == pytest.approx(right_known / count / reference)
        for figure in (result.strict, result.shared, result.normalised, result.known, result.routing):
            assert figure.low <= figure.value <= figure.high
    assert found.means["strict"].value == pytest.approx(sum(strict_by_task) / 2)
    assert found.means["strict"].deviation == pytest.approx(abs(strict_by_task[0] - strict_by_task[1]) / 2**0.5)
    assert found.means["reference"].value == pytest.approx(0.85)
    normalised = [strict_by_task[0] / 0.9, strict_by_task[1] / 0.8]
    assert found.means["normalised"].value == pytest.approx(sum(normalised) / 2)
    assert [sum(row) for row in found.confusion.counts] == [37, 61]
    sizes = [len(answers[text][2]) for pairs in rows.values() for text, _ in pairs]
    assert found.set_sizes == {size: sizes.count(size) for size in sorted(set(sizes))}


def test_a_perfect_model_is_perfect_and_a_label_without_its_task_counts_for_nothing(tmp_path):
    rows = {"a": [("a0", "x"), ("a1", "y")], "b": [("b0", "x"), ("b1", "y")]}
    truth = {text: (task, label) for task, pairs in rows.items() for text, label in pairs}
    suite = write_suite(tmp_path, rows, a={"reference": 1.0}, b={"reference": 1.0})
    perfect = massmerge.evaluate(Spied(lambda text, _: (*truth[text], (truth[text][0],))), suite)
    assert {mean.value for mean in perfect.means.values()} == {1.0}
    assert perfect.confusion.worst() == []
    other = {"a": "b", "b": "a"}
    swapped = massmerge.evaluate(
        Spied(lambda text, task: (task or other[text[0]], truth[text][1], (task or other[text[0]],))), suite
    )
    assert swapped.means["strict"].value == swapped.means["routing"].value == 0.0
    assert swapped.means["known"].value == 1.0


def test_the_interval_of_an_accuracy_is_wilsons(tmp_path):
    rows = {"a": [(f"a{i}", "x") for i in range(29)]}
    suite = write_suite(tmp_path, rows)
    found = massmerge.evaluate(Spied(lambda text, _: ("a", "x" if text == "a0" else "y", ("a",))), suite)
    figure = found.tasks[0].strict
    assert (round(figure.low, 4), round(figure.high, 4)) == (0.0061, 0.1718)


def test_shared_labels_of_the_bundles_recipe_count_too(tmp_path):
    suite = write_suite(tmp_path, {"a": [("a0", "x")]})
    model = Spied(lambda text, task: (task or "b", "x", (task or "b",)))
    assert massmerge.evaluate(model, suite).tasks[0].shared.value == 0.0
    model.shared_labels = [["a/x", "b/x"]]
    found = massmerge.evaluate(model, suite)
    assert (found.tasks[0].strict.value, found.tasks[0].shared.value) == (0.0, 1.0)


def test_times_are_of_one_input(tmp_path):
    suite, model, *_ = random_world(tmp_path, 0)
    found = massmerge.evaluate(model, suite)
    steps = {step: value for step, value in found.timings.items() if step != "all"}
    assert steps == {"first pass": 1.0, "routing": 0.25, "second pass": 2.0, "heads": 0.5}
    assert found.timings["all"] > 0


def test_metrics_of_tasks_may_differ(tmp_path):
    rows = {"a": [("a0", "x"), ("a1", "y"), ("a2", "y")], "c": [("c0", "1"), ("c1", "2"), ("c2", "3")]}
    suite = write_suite(tmp_path, rows, a={"metric": "f1", "positive": "y"}, c={"metric": "spearman"})

    class Numbers(Spied):
        def stream(self, inputs, *, task=None, **options):
            for item in inputs:
                value = float(item[1])
                routing = Routing({}, {}, [item[0]], "M0.mean")
                label = "y" if item[0] == "a" else "x"
                yield Prediction(item[0], label, value, value, routing=routing, timings={"inputs": 1})

    found = massmerge.evaluate(Numbers(), suite)
    assert [task.strict.value for task in found.tasks] == [pytest.approx(0.8), pytest.approx(1.0)]


# Notes


def test_without_a_reference_normalised_figures_are_left_out_and_it_is_said_what_to_add(tmp_path):
    suite, model, *_ = random_world(tmp_path, 0, a={"reference": 0.9})
    found = massmerge.evaluate(model, suite)
    assert found.tasks[0].normalised is not None
    assert found.tasks[1].normalised is None
    assert "normalised" not in found.means
    assert any(note.startswith("no reference for b: normalised") and "--experts" in note for note in found.notes)


def test_a_reference_of_all_rows_is_said_to_be_approximate_for_some_of_them(tmp_path):
    suite, model, *_ = random_world(tmp_path, 0, a={"reference": 0.9}, b={"reference": 0.9})
    assert not any("approximate" in note for note in massmerge.evaluate(model, suite).notes)
    assert any("approximate" in note for note in massmerge.evaluate(model, suite, limit=5).notes)


def test_a_reference_of_another_split_is_not_used(tmp_path):
    (tmp_path / "validation.csv").write_text("text,label\na0,x\n")
    task = "data: '{split}.csv', input: text"
    for reference, expected in (("0.5", None), ("{validation: 0.5}", 0.5), ("{test: 0.5}", None)):
        suite = Suite.parse(f"tasks: {{a: {{{task}, reference: {reference}}}}}")
        found = massmerge.evaluate(Spied(lambda *_: ("a", "x", ("a",))), suite, folder=tmp_path, split="validation")
        assert found.tasks[0].reference == expected
        assert any("of the split 'test'" in note for note in found.notes) == (expected is None)


def test_tasks_of_the_bundle_that_are_not_measured_are_noted(tmp_path):
    suite, model, *_ = random_world(tmp_path, 0)
    assert "not measured, though inputs may be routed there: c." in massmerge.evaluate(model, suite).notes
    only = massmerge.evaluate(model, suite, tasks=["b"])
    assert [task.task for task in only.tasks] == ["b"]
    assert "not measured, though inputs may be routed there: a, c." in only.notes


# What is refused, before anything runs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["d"]}, "no task 'd' in the suite"),
        ({"split": "validation"}, "the split 'validation' was asked for"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"experts": True}, "the experts of a loaded model are not known"),
    ],
)
def test_a_wrong_call_runs_nothing(tmp_path, change, message):
    suite, model, *_ = random_world(tmp_path, 0)
    with pytest.raises(InputError, match=message):
        massmerge.evaluate(model, suite, **change)
    assert model.calls == []


@pytest.mark.parametrize(
    ("group", "message"),
    [(["a/x", "b/typo"], r"'b/typo': the labels of b are x, y, z"), (["a/x", "d/x"], r"'d/x': neither the suite nor")],
)
def test_a_shared_label_that_no_task_has_is_refused(tmp_path, group, message):
    suite, model, *_ = random_world(tmp_path, 0, shared_labels=[group])
    with pytest.raises(InputError, match=message):
        massmerge.evaluate(model, suite)
    assert model.calls == []


def test_an_unknown_label_is_refused_before_the_bundle_is_loaded(tmp_path, root, monkeypatch):
    monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("loaded"))
    suite = write_suite(tmp_path, {"spam": [("call now", "spam"), ("hello", "eggs")]})
    with pytest.raises(InputError, match=r"labels in the data: eggs, spam\n  labels of the head: ham, spam"):
        massmerge.evaluate(text_bundle(root), suite)


# Rows that cannot be read


def test_rows_that_cannot_be_read_count_as_wrong_and_are_reported(tmp_path, root):
    suite = write_suite(tmp_path, {"topic": [("vote", "politics"), ("", "politics"), ("   ", "arts")]})
    found = massmerge.evaluate(text_bundle(root), suite, experts=True, expert_folder=root / "text")
    (topic,) = found.tasks
    assert (topic.rows, topic.failed) == (3, 2)
    assert topic.strict.value <= 1 / 3 and topic.known.value <= 1 / 3 and topic.reference <= 1 / 3
    assert found.confusion.counts[0][-1] == 2
    errors = dict(found.failures)
    assert errors[f"{tmp_path / 'topic.csv'}:2"] == "the cell of the text is empty."
    assert errors[f"{tmp_path / 'topic.csv'}:3"] == "empty text."


def picture(seed, size=40):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def image_suite(tmp_path, broken=True):
    import pyarrow

    rows = [{"image": picture(i), "label": i % 2} for i in range(5)]
    rows += [{"image": b"\x89PNG broken", "label": 0}, {"image": picture(9)[:200], "label": 1}] if broken else []
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for i in range(4):
        (tmp_path / "b" / f"LABEL_{i % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "b" / f"LABEL_{i % 3}" / f"{i}.png").write_bytes(picture(100 + i))
    text = "tasks:\n  a: {data: a.parquet, input: image, labels: [LABEL_0, LABEL_1]}\n  b: {folder: b}\n"
    (tmp_path / "suite.yaml").write_text(text)
    return tmp_path / "suite.yaml"


def test_images_that_cannot_be_decoded_count_as_wrong(tmp_path, root):
    found = massmerge.evaluate(image_bundle(root), image_suite(tmp_path))
    assert [(task.rows, task.failed) for task in found.tasks] == [(7, 2), (4, 0)]
    assert sorted(name for name, _ in found.failures) == [f"{tmp_path / 'a.parquet'}:{i}" for i in (6, 7)]
    assert all("not an image that can be read" in error for _, error in found.failures)


# Real bundles


def texts(count, seed):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS.split(), random.integers(2, 9))) for _ in range(count)]


def text_suite(tmp_path, root, count=12, **more):
    labels = {task.name: task.labels for task in massmerge.Bundle(text_bundle(root)).tasks}
    random = np.random.default_rng(0)
    rows = {
        task: [(text, str(random.choice(names))) for text in texts(count, seed)]
        for seed, (task, names) in enumerate(labels.items())
    }
    return write_suite(tmp_path, rows, **more), rows


def test_answers_are_those_of_predict(tmp_path, root):
    suite, rows = text_suite(tmp_path, root)
    found = massmerge.evaluate(text_bundle(root), suite)
    model = massmerge.load(text_bundle(root))
    for task, pairs in rows.items():
        given = model.predict([text for text, _ in pairs])
        known = model.predict([text for text, _ in pairs], task=task)
        for row in (r for r in found.results if r.task == task):
            assert (row.given.task, row.given.label) == (given[row.place].task, given[row.place].label)
            assert row.given.score == pytest.approx(given[row.place].score, abs=1e-4)
            assert (row.known.task, row.known.label) == (task, known[row.place].label)
            assert list(row.residuals) == pytest.approx(list(given[row.place].routing.residuals.values()), abs=1e-3)
    sizes = massmerge.Bundle(text_bundle(root))
    assert (found.sizes.bundle, found.sizes.base) == (sizes.counted_bytes, sizes.base_bytes)


def test_a_row_in_its_own_set_alone_is_not_run_twice_and_one_in_a_larger_set_is(tmp_path, root):
    suite, rows = text_suite(tmp_path, root)
    bundle = with_options(text_bundle(root), tmp_path / "bundle", router={"top_k": 3, "threshold": 0.0})
    found = massmerge.evaluate(bundle, suite)
    model = massmerge.load(bundle)
    assert set(found.set_sizes) == {3}
    assert found.means["in_set"].value == 1.0
    for task, pairs in rows.items():
        known = model.predict([text for text, _ in pairs], task=task)
        assert all(row.known.label == known[row.place].label for row in found.results if row.task == task)


def test_abstentions_are_counted_and_wrong(tmp_path, root):
    suite, _ = text_suite(tmp_path, root)
    found = massmerge.evaluate(text_bundle(root), suite, unknown={"lift": 100.0})
    assert [task.abstained for task in found.tasks] == [12, 12, 12]
    assert found.means["strict"].value == 0.0
    assert found.set_sizes == {0: 36}
    assert found.means["known"].value > 0.0


def naive_expert(folder, task, inputs):
    """Labels and scores that transformers alone gives; the adapter is added to the base's weights by hand."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    if task == "mood":
        model = BertForSequenceClassification.from_pretrained(folder / "base", num_labels=2).eval()
        saved = load_file(folder / "mood" / "adapter_model.safetensors")
        with torch.no_grad():
            for key, a in saved.items():
                if ".lora_A." in key:
                    b = saved[key.replace("lora_A", "lora_B")]
                    name = key.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
                    model.get_parameter(name).add_(2.0 * b @ a)  # alpha 16, rank 8
            model.classifier.weight.copy_(saved["base_model.model.classifier.weight"])
            model.classifier.bias.copy_(saved["base_model.model.classifier.bias"])
        labels = ["negative", "positive"]
    else:
        model = BertForSequenceClassification.from_pretrained(folder / task).eval()
        labels = [model.config.id2label[i] for i in range(model.config.num_labels)]
    with torch.inference_mode():
        scores = [model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(0) for text in inputs]
    return [(labels[int(row.argmax())], float(row.max())) for row in scores]


def test_measured_experts_answer_as_transformers_runs_them(tmp_path, root):
    suite, rows = text_suite(tmp_path, root)
    found = massmerge.evaluate(text_bundle(root), suite, experts=True, expert_folder=root / "text", batch_size=5)
    for result in found.tasks:
        inputs = [text for text, _ in rows[result.task]]
        expected = naive_expert(root / "text", result.task, inputs)
        answered = {row.place: row.expert for row in found.results if row.task == result.task}
        assert [answered[i].label for i in range(len(inputs))] == [label for label, _ in expected]
        scores = [answered[i].score for i in range(len(inputs))]
        assert scores == pytest.approx([score for _, score in expected], abs=1e-5)
        right = sum(label == truth for (label, _), (_, truth) in zip(expected, rows[result.task], strict=True))
        assert result.reference == pytest.approx(right / len(inputs))
        assert result.reference_source == "measured"


def test_measured_image_experts_answer_as_transformers_runs_them(tmp_path, root):
    found = massmerge.evaluate(
        image_bundle(root), image_suite(tmp_path), experts=True, expert_folder=root / "image", tasks=["a"]
    )
    model = ViTForImageClassification.from_pretrained(root / "image" / "a").eval()
    processor = ViTImageProcessorPil.from_pretrained(root / "image" / "base")
    for row in found.results:
        if row.error is None:
            image = Image.open(io.BytesIO(picture(row.place))).convert("RGB")
            with torch.inference_mode():
                best = int(model(**processor(images=image, return_tensors="pt")).logits.argmax())
            assert row.expert.label == f"LABEL_{best}"
        else:
            assert row.expert.label is None


def test_a_measured_expert_goes_before_the_suites_reference(tmp_path, root):
    suite, _ = text_suite(tmp_path, root, spam={"reference": 0.123})
    by_suite = massmerge.evaluate(text_bundle(root), suite, tasks=["spam"])
    measured = massmerge.evaluate(text_bundle(root), suite, tasks=["spam"], experts=True, expert_folder=root / "text")
    assert (by_suite.tasks[0].reference, by_suite.tasks[0].reference_source) == (0.123, "suite")
    assert measured.tasks[0].reference != 0.123
    assert measured.tasks[0].reference_source == "measured"


def test_experts_that_are_not_there_any_more_are_an_error_before_anything_runs(tmp_path, root, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("loaded"))
    suite, _ = text_suite(tmp_path, root)
    with pytest.raises(InputError, match=r"The experts' own figures need the experts\..*--folder names another place"):
        massmerge.evaluate(text_bundle(root), suite, experts=True)


def test_another_router_can_be_chosen(tmp_path, root):
    suite, rows = text_suite(tmp_path, root)
    bundle = tmp_path / "bundle"
    shutil.copytree(text_bundle(root), bundle)
    from massmerge.calibration import calibrate

    calibrate(bundle, {task: [text for text, _ in pairs] for task, pairs in rows.items()})
    fitted, plain = (massmerge.evaluate(bundle, suite, router=router, oracle=False) for router in (None, "projection"))
    assert (fitted.options["router"], plain.options["router"]) == ("prototype", "projection")
    assert fitted.means["routing"].value > plain.means["routing"].value


# The report


@pytest.fixture(scope="module")
def reported(root, tmp_path_factory):
    """An evaluation with its report."""
    folder = tmp_path_factory.mktemp("reported")
    suite, _ = text_suite(folder, root, shared_labels=[["spam/ham", "mood/positive"]])
    (folder / "topic.csv").write_text((folder / "topic.csv").read_text() + ",arts\n<script>$x$,arts\n")
    report = folder / "report"
    found = massmerge.evaluate(text_bundle(root), suite, experts=True, expert_folder=root / "text", report=report)
    return found, report, suite


def test_the_report_has_its_files(reported):
    _, report, _ = reported
    names = {path.relative_to(report).as_posix() for path in report.rglob("*") if path.is_file()}
    assert {name for name in names if "/" not in name} == {
        "report.md", "report.html", "result.json", "predictions.parquet", "radar.png", "confusion.png", "residuals.png",
    }  # fmt: skip
    assert len([name for name in names if name.startswith("experts/")]) == 3
    for name in ("radar", "confusion", "residuals"):
        width, height = Image.open(report / f"{name}.png").size
        assert width > 400 and height > 200


def test_the_page_needs_no_other_file(reported):
    _, report, _ = reported
    page = (report / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 3
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


def test_both_reports_have_every_task_with_its_figures(reported):
    found, report, _ = reported
    for name in ("report.md", "report.html"):
        text = (report / name).read_text()
        for task in found.tasks:
            assert task.task in text
            assert f"{100 * task.strict.value:.1f} %" in text
            assert f"{100 * task.reference:.1f} %" in text
        assert "could not be read" in text
        assert "Wilson" in text and "bootstrap" in text


def test_the_result_is_what_to_dict_gives(reported):
    found, report, _ = reported
    data = json.loads((report / "result.json").read_text())
    assert data == json.loads(json.dumps(found.to_dict()))
    assert data == json.loads(found.to_json())
    assert data["failures"][0]["error"] == "the cell of the text is empty."


def test_every_answer_is_in_a_table(reported):
    found, report, _ = reported
    rows = parquet.read_table(report / "predictions.parquet").to_pylist()
    assert len(rows) == 38
    for task in found.tasks:
        own = [row for row in rows if row["task"] == task.task]
        assert sum(row["right"] for row in own) / len(own) == pytest.approx(task.strict.value)
        assert sum(row["right_shared"] for row in own) / len(own) == pytest.approx(task.shared.value)
        assert sum(row["label"] == row["label_expert"] for row in own) / len(own) == pytest.approx(task.reference)
        for row in own:
            residuals = {t: row[f"residual_{t}"] for t in ("spam", "topic", "mood")}
            if row["error"] is None:
                assert min(residuals, key=residuals.get) == row["selected"].split()[0]
            else:
                assert set(residuals.values()) == {None}


def test_without_pyarrow_the_table_is_csv(reported, tmp_path, monkeypatch):
    from massmerge.evaluation.predictions import write_predictions

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write_predictions(reported[0], tmp_path)
    assert path.name == "predictions.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 38
    assert rows[0]["task"] in ("spam", "topic", "mood")


def test_kept_answers_of_experts_are_used_for_the_same_rows_only(reported, root, monkeypatch, tmp_path):
    from massmerge.evaluation import experts

    found, report, suite = reported
    measured = []
    real = experts._measure
    monkeypatch.setattr(experts, "_measure", lambda o, data, *rest: measured.append(data.task) or real(o, data, *rest))
    shutil.copytree(report, tmp_path / "report")
    options = {"experts": True, "expert_folder": root / "text", "report": tmp_path / "report"}
    again = massmerge.evaluate(text_bundle(root), suite, **options)
    assert measured == []
    assert [t.reference for t in again.tasks] == [t.reference for t in found.tasks]
    massmerge.evaluate(text_bundle(root), suite, **options, limit=5, tasks=["spam"])
    assert measured == ["spam"]
    for path in (tmp_path / "report" / "experts").glob("mood-*"):
        path.write_text("{cut off")
    massmerge.evaluate(text_bundle(root), suite, **options, tasks=["mood"])
    assert measured == ["spam", "mood"]


def test_without_matplotlib_a_report_is_refused_at_once_and_figures_are_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    suite, model, *_ = random_world(tmp_path, 0)
    with pytest.raises(MassError, match=r"matplotlib: pip install 'massmerge\[eval\]'"):
        massmerge.evaluate(model, suite, report=tmp_path / "report")
    assert model.calls == []
    assert massmerge.evaluate(model, suite).means["strict"].value > 0


def test_a_bundle_of_one_task_has_nothing_to_route_and_is_reported_all_the_same(tmp_path):
    suite = write_suite(tmp_path, {"a": [("a0", "x"), ("a1", "y")]})

    class Single(Spied):
        def stream(self, inputs, **_):
            routing = Routing({}, {"a": 1.0}, ["a"], "none: the task was given")
            for _item in inputs:
                yield Prediction("a", "x", 0.9, 1.0, routing=routing, timings={"second pass": 1.0, "inputs": 1})

    found = massmerge.evaluate(Single(labels={"a": ("x", "y")}), suite, report=tmp_path / "report")
    assert found.means["routing"].value == 1.0
    assert found.means["strict"].deviation is None
    assert not (tmp_path / "report" / "residuals.png").exists()
