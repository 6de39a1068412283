"""Evaluations of real bundles, against their answers and their own experts."""

import io
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertForSequenceClassification, ViTForImageClassification, ViTImageProcessorPil

import massmerge
from eval_suite import text_suite, write_suite
from massmerge import InputError
from massmerge.evaluation import evaluate as module
from massmerge.evaluation.summary import second_pass_advice
from models import image_bundle, text_bundle, with_options

# Rows that cannot be read


def test_rows_that_cannot_be_read_count_as_wrong_and_are_reported(tmp_path, root):
    suite = write_suite(tmp_path, {"topic": [("vote", "politics"), ("", "politics"), ("   ", "arts")]})
    found = massmerge.evaluate(text_bundle(root), suite, experts=True, folder=root / "text")
    (topic,) = found.tasks
    assert (topic.rows, topic.failed) == (3, 2)
    assert topic.strict.value <= 1 / 3 and topic.known.value <= 1 / 3 and topic.reference <= 1 / 3
    assert found.confusion.counts[0][-1] == 2
    errors = dict(found.failures)
    assert errors[f"{tmp_path / 'topic.csv'}:2"] == "the text cell is empty."
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
    assert all("not a readable image" in error for _, error in found.failures)


# Real bundles


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
    found = massmerge.evaluate(text_bundle(root), suite, experts=True, folder=root / "text", batch_size=5)
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
        image_bundle(root), image_suite(tmp_path), experts=True, folder=root / "image", tasks=["a"]
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
    measured = massmerge.evaluate(text_bundle(root), suite, tasks=["spam"], experts=True, folder=root / "text")
    assert (by_suite.tasks[0].reference, by_suite.tasks[0].reference_source) == (0.123, "suite")
    assert measured.tasks[0].reference != 0.123
    assert measured.tasks[0].reference_source == "measured"


def test_experts_that_are_not_there_any_more_are_an_error_before_anything_runs(tmp_path, root, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("loaded"))
    suite, _ = text_suite(tmp_path, root)
    with pytest.raises(InputError, match=r"Measuring the experts needs their files\..*use --folder to change that"):
        massmerge.evaluate(text_bundle(root), suite, experts=True)


def test_another_router_can_be_chosen(tmp_path, root):
    suite, rows = text_suite(tmp_path, root)
    bundle = tmp_path / "bundle"
    shutil.copytree(text_bundle(root), bundle)
    from massmerge.model.calibrate import calibrate

    calibrate(bundle, {task: [text for text, _ in pairs] for task, pairs in rows.items()})
    fitted, plain = (massmerge.evaluate(bundle, suite, router=router, oracle=False) for router in (None, "projection"))
    assert (fitted.options["router"], plain.options["router"]) == ("linear", "projection")
    assert fitted.means["routing"].value > plain.means["routing"].value


# One pass


def test_one_pass_is_measured_beside_the_experts_and_proposed_where_it_is_enough(tmp_path, root):
    suite, rows = text_suite(tmp_path, root)
    found = massmerge.evaluate(text_bundle(root), suite, experts=True, folder=root / "text")
    model = massmerge.load(text_bundle(root))
    for task in found.tasks:
        texts, truths = [text for text, _ in rows[task.task]], [label for _, label in rows[task.task]]
        free, given = model.predict(texts, passes=1), model.predict(texts, passes=1, task=task.task)
        right = [(p.task, p.label) == (task.task, truth) for p, truth in zip(free, truths, strict=True)]
        assert task.once.value == pytest.approx(np.mean(right))
        assert task.once_known.value == pytest.approx(
            np.mean([p.label == t for p, t in zip(given, truths, strict=True)])
        )
    means = found.means | {
        name: found.means["strict"]._replace(value=0.5) for name in ("strict", "known", "once_known")
    }
    for once, told in ((0.5, True), (0.48, False)):
        told_of = replace(found, means=means | {"once": found.means["once"]._replace(value=once)})
        assert ("may not need the second pass" in (second_pass_advice(told_of) or "")) is told
