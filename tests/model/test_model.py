"""A loaded bundle as it is used: inputs of every kind, what it tells, and what is refused."""

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import massmerge
from answers import assert_same_answers, bert_rows
from massmerge import InputError
from models import family_bundle, image_bundle, text_bundle, with_options
from naive import relative_error

TEXTS = ["win a free prize now", "the team won the match", "a sad song", "vote on the new law", "happy"]


@pytest.fixture(scope="module")
def text(root):
    return massmerge.load(text_bundle(root))


# Inputs of every kind, streamed


def test_one_text_is_one_input(text):
    assert len(text.predict("win a prize")) == 1


def test_texts_and_pairs_of_texts_may_stand_side_by_side(text):
    found = text.predict(["a good film", ("a good film", "a bad song"), "win"])
    alone = [text.predict([item])[0] for item in ["a good film", ("a good film", "a bad song"), "win"]]
    assert_same_answers(found, alone)
    assert found[0].routing.residuals != found[1].routing.residuals


def test_any_iterable_of_texts_is_answered(text):
    expected = text.predict(TEXTS)
    for inputs in (tuple(TEXTS), iter(TEXTS), (t for t in TEXTS), np.array(TEXTS), dict.fromkeys(TEXTS).keys()):
        assert_same_answers(text.predict(inputs), expected)


def test_what_a_tokenizer_gives_is_a_batch_of_ready_inputs(root, text):
    tokenizer = AutoTokenizer.from_pretrained(text_bundle(root) / "processor")
    ready = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert_same_answers(text.predict(ready), text.predict(TEXTS))
    assert_same_answers(text.predict(dict(ready)), text.predict(TEXTS))


def test_ready_tensors_may_stand_beside_texts(text):
    ids = torch.tensor([2, 5, 6, 3])
    found = text.predict(["a good film", {"input_ids": ids}])
    assert_same_answers(found, [text.predict("a good film")[0], text.predict({"input_ids": ids})[0]])


def test_an_empty_list_has_no_answers(text):
    assert text.predict([]) == []
    assert text.route([]) == []
    assert text.embed([]).numel() == 0
    assert text.activations([]) == []


def test_images_can_be_given_as_path_text_of_a_path_picture_array_or_tensor(root, tmp_path):
    from PIL import Image

    model = massmerge.load(image_bundle(root))
    array = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    picture = Image.fromarray(array)
    picture.save(tmp_path / "x.png")
    pixels = model.core.reader.processor(images=picture, return_tensors="pt")["pixel_values"]
    expected = model.predict(picture)
    for given in (tmp_path / "x.png", str(tmp_path / "x.png"), [picture], array, array[None], pixels, pixels[0]):
        assert_same_answers(model.predict(given), expected)
    assert_same_answers(model.predict({"pixel_values": pixels}), expected)


def test_a_stream_reads_no_further_than_the_batch_it_answers(text):
    taken = []

    def endless():
        for i in itertools.count():
            taken.append(i)
            yield TEXTS[i % len(TEXTS)]

    stream = text.stream(endless(), batch_size=4)
    for expected in (4, 4, 4, 4, 8):
        next(stream)
        assert len(taken) == expected


def test_an_input_that_cannot_be_read_has_its_error_in_its_row(text):
    found = text.predict(["win", "", "a good film"], on_error="row")
    assert [p.error for p in found] == [None, "empty text.", None]
    assert found[1].task is None
    assert_same_answers([found[0], found[2]], text.predict(["win", "a good film"]))


def test_an_input_that_cannot_be_read_stops_everything_by_default(text):
    with pytest.raises(InputError, match="empty text"):
        text.predict(["win", ""])


def test_a_batch_of_errors_alone_is_answered_with_them(text):
    assert [p.error for p in text.predict(["", " "], on_error="row")] == ["empty text.", "empty text."]


# What else a model tells


def test_timings_say_where_the_time_of_the_batch_went(text):
    found = text.predict(TEXTS)[0].timings
    assert found.keys() == {"first pass", "routing", "second pass", "heads", "inputs"}
    assert found["inputs"] == len(TEXTS)
    assert text.predict(TEXTS, task="spam")[0].timings.keys() == {"second pass", "heads", "inputs"}


def test_a_model_knows_its_tasks_labels_and_sites(text):
    assert text.tasks == ["spam", "topic", "mood"]
    assert text.labels["topic"] == ("politics", "sports", "science", "arts")
    assert text.takes_images is False
    assert {"A0", "M3"} <= {site.name for site in text.sites}


def test_labels_are_those_of_the_task_that_answers(text):
    for prediction in text.predict(TEXTS):
        assert prediction.label in text.labels[prediction.task]


def test_a_prediction_can_be_had_as_plain_data(text):
    data = text.predict("win")[0].to_dict()
    assert data["routing"]["selected"] == [data["task"]]
    assert isinstance(data["alternatives"][0], dict)


def test_features_have_a_row_for_each_input_in_its_order(bert):
    rows = bert_rows(7)
    together = bert.embed(rows, batch_size=3)
    assert together.shape == (7, 32)
    assert relative_error(bert.embed([rows[5]])[0], together[5]) < 1e-4


# Bundles that cannot be loaded


def test_a_folder_that_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"not a bundle \(no mass\.json in it\).*mass merge"):
        massmerge.load(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="nowhere: no such folder"):
        massmerge.load(tmp_path / "nowhere")


def test_a_damaged_bundle_is_refused_with_the_file_and_what_to_do(root, tmp_path):
    bundle = with_options(family_bundle(root, "bert"), tmp_path / "bundle")
    path = bundle / "tasks" / "b" / "factors.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"(?s)damaged:.*tasks/b/factors\.safetensors.*copy the bundle again"):
        massmerge.load(bundle)


def changed_byte(root, folder):
    """A bundle with one byte changed in a file whose size and header are right."""
    bundle = with_options(family_bundle(root, "bert"), folder)
    path = bundle / "tasks" / "b" / "factors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return bundle


def test_changed_bytes_are_refused_at_once_if_asked_for_and_never_if_not(root, tmp_path):
    bundle = changed_byte(root, tmp_path / "bundle")
    with pytest.raises(InputError, match="SHA-256 differs"):
        massmerge.load(bundle, check=True)
    assert massmerge.load(bundle, check=False).core.watch is None


def test_a_site_that_does_not_exist_is_refused_when_loading(root, tmp_path):
    bundle = with_options(family_bundle(root, "bert"), tmp_path / "bundle", router={"site": "M7"})
    with pytest.raises(InputError, match=r"no site 'M7'\. Choose from A0, O0, M0, D0, A1, O1, M1, D1"):
        massmerge.load(bundle)


def test_a_cache_of_no_size_is_refused(root):
    with pytest.raises(InputError, match="'lots' is no size"):
        massmerge.load(family_bundle(root, "bert"), cache="lots")


def test_options_that_there_are_not_are_refused(root, text):
    for call, words in {
        lambda: massmerge.load(text_bundle(root), check="x"): "check is True, False or 'background', not 'x'",
        lambda: text.predict("a", on_error="x"): "on_error is 'raise' or 'row', not 'x'",
        lambda: massmerge.merge(
            text_bundle(root).parent / "recipe.yaml", root / "never", workers=0
        ): "at least 1, not 0",
    }.items():
        with pytest.raises(InputError, match=words):
            call()


def test_inputs_and_what_belongs_to_each_must_be_as_many(text):
    ids = torch.ones(2, 5, dtype=torch.long)
    for call, words in {
        lambda: text.predict(
            {"input_ids": ids, "attention_mask": ids[:1]}
        ): r"input_ids \(2, 5\), attention_mask \(1, 5\)",
        lambda: text.outcomes(["a"], []): "1 inputs and 0 tasks",
        lambda: text.answer(["a", "b"], text.route(["a"])): r"more inputs than routings \(1\)",
    }.items():
        with pytest.raises(InputError, match=words):
            call()
