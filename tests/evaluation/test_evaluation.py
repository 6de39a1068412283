"""Evaluations of a constructed model whose answers are known."""

import pytest

import massmerge
from eval_suite import Spied, random_world, write_suite
from massmerge import InputError, Prediction, Routing, Suite
from massmerge.evaluation import evaluate as module
from massmerge.evaluation.prepared import prepare_evaluation
from massmerge.evaluation.run import RowAnswers, run_stream
from models import text_bundle

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

    run_stream(RowAnswers(model), ready, seed=0, route="input", batch_size=32, unknown=None, progress=watch)
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
            # Routed to its own task alone, the answer is the same as with the task given.
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
        found = massmerge.evaluate(
            Spied(lambda *_: ("a", "x", ("a",))), suite, suite_folder=tmp_path, split="validation"
        )
        assert found.tasks[0].reference == expected
        assert any("for the split 'test'" in note for note in found.notes) == (expected is None)


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
        ({"split": "validation"}, "the split 'validation' was requested"),
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
