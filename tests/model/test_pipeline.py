"""A bundle called like a pipeline of transformers: the same shapes, labels and scores."""

import numpy as np
import pytest
import transformers
from PIL import Image

import massmerge as mm
from models import FAMILIES, family_bundle, make_bundle, text_bundle

TEXTS = ["a text", "another one", "and a third"]


@pytest.fixture(scope="module")
def pair(root, tmp_path_factory):
    """A task of a bundle as our pipeline and as transformers'."""
    bundle = text_bundle(root)
    name = mm.load(bundle).tasks[0]
    folder = tmp_path_factory.mktemp("exported") / "model"
    mm.export(bundle, folder, "hf", tasks=[name])
    theirs = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    return name, mm.pipeline(bundle), theirs


def plain(answer):
    """Without our `task`, and with scores to compare."""
    if isinstance(answer, list):
        return [plain(one) for one in answer]
    return {"label": answer["label"], "score": pytest.approx(answer["score"], abs=1e-5)}


@pytest.mark.parametrize("given", [TEXTS[0], TEXTS, TEXTS[:1], {"text": TEXTS[0]}], ids=str)
@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_k": 2}, {"top_k": None}], ids=str)
def test_a_call_gives_what_transformers_gives(pair, given, options):
    name, ours, theirs = pair
    assert plain(ours(given, task=name, **options)) == plain(theirs(given, **options))


def test_top_k_may_be_given_once_for_all(pair, root):
    name, _, theirs = pair
    ours = mm.pipeline(text_bundle(root), top_k=2)
    other = transformers.pipeline("text-classification", model=theirs.model, tokenizer=theirs.tokenizer, top_k=2)
    assert plain(ours(TEXTS[0], task=name)) == plain(other(TEXTS[0]))
    assert plain(ours(TEXTS, task=name)) == plain(other(TEXTS))


def test_without_a_task_the_labels_are_those_of_the_task_that_answers(root):
    model = mm.load(text_bundle(root))
    for text, rows in zip(TEXTS, mm.pipeline(model)(TEXTS, top_k=None), strict=True):
        answer = model.predict(text)[0]
        assert {row["task"] for row in rows} == {answer.task}
        assert sorted(row["label"] for row in rows) == sorted(model.labels[answer.task])
        assert sum(row["score"] for row in rows) == pytest.approx(1.0, abs=1e-5)


def test_a_generator_is_answered_as_it_is_read(root):
    read = []

    def rows():
        for text in TEXTS:
            read.append(text)
            yield text

    answers = mm.pipeline(text_bundle(root), batch_size=1)(rows())
    assert next(answers)["label"] and len(read) < len(TEXTS)


def test_a_data_set_is_answered_row_by_row(pair):
    from transformers.pipelines.pt_utils import KeyDataset

    name, ours, theirs = pair
    rows = KeyDataset([{"text": text, "other": 1} for text in TEXTS], "text")
    options = {"batch_size": 2, "truncation": True}
    assert plain(list(ours(rows, task=name, **options))) == plain(list(theirs(rows, **options)))


def test_what_a_bundle_always_does_cannot_be_turned_off(pair):
    with pytest.raises(mm.InputError, match="always pads and truncates"):
        pair[1](TEXTS, truncation=False)


@pytest.fixture(scope="module")
def picture_pair(root, tmp_path_factory):
    """A task of a bundle of seven labels as our pipeline and as transformers', and two pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "base").mkdir()
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder / "base")
    bundle = make_bundle(folder, "vit", {"a": 7, "b": 2}, merge={"rank": 8})
    mm.export(bundle, folder / "exported", "hf", tasks=["a"])
    theirs = transformers.pipeline("image-classification", model=str(folder / "exported"), device="cpu")
    pictures = [Image.new("RGB", (40, 30), (90 * i, 40, 200)) for i in range(2)]
    pictures[0].save(folder / "first.png")
    return mm.pipeline(bundle), theirs, pictures, str(folder / "first.png")


@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_k": 3}, {"top_k": None}, {"batch_size": 2}], ids=str)
def test_pictures_give_what_transformers_gives(picture_pair, options):
    ours, theirs, pictures, path = picture_pair
    for given in (pictures[0], pictures, pictures[:1], path, [path, path]):
        assert plain(ours(given, task="a", **options)) == plain(theirs(given, **options))


def test_images_give_lists_of_labels(root):
    pipe = mm.pipeline("image-classification", model=family_bundle(root, "vit"))
    size = FAMILIES["vit"].make_inputs(1)["pixel_values"].shape[-1]
    array = np.zeros((3, size, size), dtype=np.float32)
    assert pipe.task == "image-classification"
    one, several = pipe({"pixel_values": array}), pipe([{"pixel_values": array}] * 2)
    assert several == [one, one] and set(one[0]) == {"label", "score", "task"}
    assert one == sorted(one, key=lambda row: -row["score"])


def test_another_kind_of_pipeline_is_refused(root):
    with pytest.raises(mm.InputError, match="is for text-classification, not 'image-classification'"):
        mm.pipeline("image-classification", model=text_bundle(root))


@pytest.mark.parametrize("top_k", [0, -1, "many", 1.5])
def test_a_top_k_that_is_none_is_refused(pair, top_k):
    with pytest.raises(mm.InputError, match="top_k"):
        pair[1]("a text", top_k=top_k)
