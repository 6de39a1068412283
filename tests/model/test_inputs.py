"""What people hand in: text, pairs, images, ready tensors; and what is refused, in which words."""

import re
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import massmerge
from massmerge import InputError
from massmerge.model.inputs import InputReader
from models import FAMILIES, family_bundle, image_bundle, text_bundle


@pytest.fixture(scope="module")
def text(root):
    return massmerge.load(text_bundle(root))


@pytest.fixture(scope="module")
def image(root):
    return massmerge.load(image_bundle(root))


def reader(root):
    """A fresh reader of texts."""
    base = massmerge.load(text_bundle(root)).core.base
    return InputReader(text_bundle(root) / "processor", base.config, image=False)


def refused(model, item):
    """The words with which an input is refused."""
    with pytest.raises(InputError) as caught:
        model.predict([item])
    return str(caught.value)


def png(path, width, height, data=b""):
    """A PNG that says it has that size, with whatever pixels are given."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b""))
    return path


# Text


@pytest.mark.parametrize("item", ["", "   ", "\n\t", ("", " ")])
def test_an_empty_text_is_refused(text, item):
    assert refused(text, item) == "empty text."


def test_a_pair_with_one_empty_part_is_an_input(text):
    assert text.predict([("win a prize", "")])[0].task


@pytest.mark.parametrize("item", [5, None, 1.5, b"bytes", ["a", "b", "c"], object(), torch.ones(3)])
def test_what_is_no_text_is_refused_with_its_kind(text, item):
    assert re.match(r"this model takes text or pairs of texts, not [\w.]+\.$", refused(text, item))


def test_a_single_thing_that_is_no_input_is_refused_as_in_a_list(text):
    for item in (5, None, b"bytes"):
        with pytest.raises(InputError, match="this model takes text"):
            text.predict(item)


def test_text_with_bytes_that_are_not_utf_8_is_refused(text):
    assert "not UTF-8" in refused(text, b"caf\xe9 latte".decode("utf-8", "surrogateescape"))


def test_a_text_of_more_characters_than_any_model_reads_is_refused(text):
    assert "more than 10,000,000 characters" in refused(text, "a" * 10_000_001)


def test_a_text_longer_than_the_model_s_limit_is_truncated(root):
    with pytest.warns(UserWarning, match="text of more than 512 tokens was truncated"):
        row = reader(root).row("win " * 1000)
    assert row["input_ids"].shape == (512,)


def test_truncation_is_said_once(root):
    fresh = reader(root)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            fresh.row("win " * 1000)
    assert len([w for w in said if "truncated" in str(w.message)]) == 1


def test_a_text_that_just_fits_is_not_called_truncated(root):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader(root).row("win " * 510)["input_ids"].shape == (512,)


def test_the_limit_is_the_number_of_positions_where_the_tokenizer_knows_none(root):
    fresh = reader(root)
    fresh.processor.model_max_length = 10**30
    with pytest.warns(UserWarning, match="512 tokens"):
        assert fresh.row("win " * 1000)["input_ids"].shape == (512,)


def test_a_long_text_is_answered_as_its_beginning(text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        long, cut = text.predict(["win " * 1000, "win " * 510])
    assert (long.task, long.label) == (cut.task, cut.label)
    assert abs(long.score - cut.score) < 1e-5


def test_a_tokenizer_is_given_no_more_of_a_text_than_can_fit(text, monkeypatch):
    tokenizer = text.core.reader.processor
    given, call = [], type(tokenizer).__call__

    def recorded(self, *texts, **options):
        given.extend(map(len, texts))
        return call(self, *texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", recorded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text.predict(["win " * 1_000_000])
    assert given and max(given) < 200_000


def test_a_bundle_without_a_tokenizer_says_how_to_get_one(root):
    model = massmerge.load(family_bundle(root, "bert"))
    assert re.search(r"no tokenizer that can be loaded.*`processor:`.*ready tensors", refused(model, "a text"))


# Ready tensors of text


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({}, "ready tensors must hold 'input_ids'; these hold nothing"),
        ({"pixel_values": torch.ones(3, 2, 2)}, "must hold 'input_ids'; these hold 'pixel_values'"),
        ({"input_ids": torch.ones(3)}, r"whole numbers of shape \(tokens,\); these are torch\.float32 \(3,\)"),
        ({"input_ids": torch.ones(1, 2, 3).long()}, r"these are torch\.int64 \(1, 2, 3\)"),
        ({"input_ids": torch.ones(0).long()}, r"these are torch\.int64 \(0,\)"),
        ({"input_ids": torch.tensor([5, 2000])}, "must lie between 0 and 1999"),
        ({"input_ids": torch.tensor([5, -1])}, "must lie between 0 and 1999"),
        ({"input_ids": torch.tensor([5, 6]), "attention_mask": torch.ones(3)}, "attention_mask: must be whole numbers"),
        ({"input_ids": torch.tensor([5, 6]), "attention_mask": torch.full((2,), torch.nan)}, "attention_mask: must be"),
        ({"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([0, 1])}, "labels: not read here. Leave it out"),
    ],
)  # fmt: skip
def test_wrong_ready_tensors_are_refused_with_what_is_wrong(text, item, words):
    assert re.search(words, refused(text, item))


def test_more_tokens_than_positions_are_refused(root):
    model = massmerge.load(family_bundle(root, "bert"))
    assert re.search(r"41 tokens.*at most 40", refused(model, {"input_ids": torch.ones(41).long()}))


def test_token_types_that_the_model_does_not_know_are_refused(root):
    model = massmerge.load(family_bundle(root, "bert"))
    ids = torch.ones(3).long()
    assert "token_type_ids must lie between 0 and 1" in refused(model, {"input_ids": ids, "token_type_ids": ids * 9})


def test_lists_of_numbers_are_ready_tensors_too(text):
    assert text.predict({"input_ids": [2, 5, 6, 3]})[0].task


# Images


def test_an_image_of_50000_by_50000_pixels_is_refused_before_it_is_decoded(image, tmp_path):
    words = refused(image, png(tmp_path / "huge.png", 50_000, 50_000))
    assert "huge.png: " in words
    assert "at most 100,000,000 are decoded. Scale it down." in words


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_just_above_the_bound_is_refused_with_its_size(image, tmp_path):
    words = refused(image, png(tmp_path / "large.png", 11_000, 10_000))
    assert "large.png: 11000×10000 pixels; at most 100,000,000 are decoded" in words


def test_an_empty_image_file_is_refused(image, tmp_path):
    (tmp_path / "x.png").write_bytes(b"")
    assert refused(image, tmp_path / "x.png") == f"{tmp_path / 'x.png'}: the file is empty."


def test_a_missing_image_file_is_refused(image, tmp_path):
    assert refused(image, str(tmp_path / "x.png")) == f"{tmp_path / 'x.png'}: no such file."


def test_a_folder_in_the_place_of_an_image_is_refused(image, tmp_path):
    assert "not a readable image" in refused(image, tmp_path)


def test_a_file_that_is_no_image_is_refused(image, tmp_path):
    (tmp_path / "x.png").write_bytes(b"not a picture at all")
    assert re.search(r"x\.png: not a readable image", refused(image, tmp_path / "x.png"))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["png", "jpeg", "gif", "bmp", "webp", "tiff"])
def test_an_image_file_cut_off_or_garbled_anywhere_is_refused_or_read_but_never_a_crash(image, tmp_path, form):
    noise = np.random.default_rng(0)
    whole = tmp_path / f"whole.{form}"
    Image.fromarray(noise.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(whole)
    data = whole.read_bytes()
    for i in range(40):
        broken = bytearray(data[: int(noise.integers(1, len(data)))] if i % 2 else data)
        for place in noise.integers(0, len(broken), 4):
            broken[place] = int(noise.integers(0, 255))
        (tmp_path / f"broken.{form}").write_bytes(bytes(broken))
        prediction = image.predict([tmp_path / f"broken.{form}"], on_error="row")[0]
        assert prediction.task or f"broken.{form}: " in prediction.error


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16", "F"])
def test_pictures_of_every_mode_are_read(image, mode):
    assert image.predict(Image.new(mode, (40, 30)))[0].task


def test_a_photograph_is_turned_as_the_camera_says(image, tmp_path):
    array = np.random.default_rng(0).integers(0, 255, (40, 20, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    Image.fromarray(array).save(tmp_path / "turned.png", exif=exif)
    found = image.core.reader.row(tmp_path / "turned.png")["pixel_values"]
    expected = image.core.reader.row(Image.fromarray(np.rot90(array, -1).copy()))["pixel_values"]
    assert torch.equal(found, expected)


def test_one_pixel_is_an_image(image):
    assert image.predict(Image.new("RGB", (1, 1)))[0].task


@pytest.mark.parametrize("item", [Image.new("RGB", (0, 5)), np.zeros((3, 0, 3), dtype=np.uint8)], ids=["PIL", "array"])
def test_an_image_without_a_pixel_is_refused(image, item):
    assert "has nothing to see" in refused(image, item)


@pytest.mark.parametrize("item", [5, None, ("a.png", "b.png"), object()])
def test_what_is_no_image_is_refused_with_its_kind(image, item):
    assert re.match(r"this model takes images or paths of images, not \w+\.$", refused(image, item))


def test_an_array_of_other_numbers_than_bytes_is_refused(image):
    words = refused(image, np.zeros((4, 4, 3), dtype=np.float32))
    assert words == "an array must hold bytes (uint8) of shape (height, width, 3); this is float32."


def test_an_array_of_a_shape_that_is_no_image_is_refused(image):
    assert "not a readable image" in refused(image, np.zeros((4, 4, 7), dtype=np.uint8))


def test_an_image_model_without_a_processor_says_how_to_get_one(root):
    model = massmerge.load(family_bundle(root, "vit"))
    assert "no image processor that can be loaded" in refused(model, Image.new("RGB", (4, 4)))


# Ready tensors of images


@pytest.mark.parametrize("shape", [(32, 32, 3), (1, 32, 32), (32, 32)])
def test_a_ready_image_of_a_wrong_shape_is_refused_with_the_right_one(image, shape):
    words = refused(image, torch.zeros(shape))
    assert "a ready image is a floating-point tensor (3, height, width); this is torch.float32 " + str(shape) in words


def test_a_ready_image_of_whole_numbers_is_refused(image):
    assert "this is torch.uint8 (3, 32, 32)" in refused(image, torch.zeros(3, 32, 32, dtype=torch.uint8))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_ready_image_with_nan_or_infinity_is_refused(image, value):
    pixels = torch.zeros(3, 32, 32)
    pixels[1, 2, 3] = value
    assert refused(image, pixels) == "the tensor holds NaN or infinity."
    assert refused(image, {"pixel_values": pixels}) == "the tensor holds NaN or infinity."


def test_a_ready_image_of_a_size_that_the_model_does_not_take_is_refused(image):
    assert re.match(r"a tensor \(3, 16, 16\) does not fit the backbone: ", refused(image, torch.zeros(3, 16, 16)))


def test_a_wrong_size_in_a_batch_is_that_row_s_error(image):
    found = image.predict([torch.zeros(3, 32, 32), torch.zeros(3, 16, 16)], on_error="row")
    assert found[0].task
    assert "(3, 16, 16) does not fit" in found[1].error


def test_a_model_that_takes_any_size_takes_batches_of_one_size_only(root):
    model = massmerge.load(family_bundle(root, "dinov2"))
    pixels = [torch.zeros(3, 28, 28), torch.zeros(3, 42, 42)]
    assert len(model.predict(pixels, batch_size=1)) == 2
    with pytest.raises(InputError, match="images of 28×28 and 42×42 pixels do not fit into one batch"):
        model.predict(pixels)


def test_half_precision_images_are_read(image):
    pixels = torch.randn(3, 32, 32).half()
    assert image.predict(pixels)[0].task == image.predict(pixels.float())[0].task


# Batches of text


def test_text_is_padded_on_the_right_to_the_longest_of_its_batch(text):
    rows = [{"input_ids": torch.tensor([5, 6, 7])}, {"input_ids": torch.tensor([8])}]
    read = text.core.reader
    batch = read.batch([read.row(row) for row in rows])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_the_padding_token_is_the_base_s(root):
    read = massmerge.load(family_bundle(root, "roberta")).core.reader
    rows = [read.row({"input_ids": torch.full((n,), 9)}) for n in (3, 1)]
    assert read.batch(rows)["input_ids"].tolist() == [[9, 9, 9], [9, 1, 1]]


def test_roberta_has_fewer_positions_than_rows_in_its_table(root):
    model = massmerge.load(family_bundle(root, "roberta"))
    limit = FAMILIES["roberta"].options["max_position_embeddings"] - 2
    assert model.predict({"input_ids": torch.full((limit,), 9)})[0].task
    assert re.search(f"at most {limit}", refused(model, {"input_ids": torch.full((limit + 1,), 9)}))


def test_an_answer_says_that_its_text_was_cut(root):
    model = massmerge.load(text_bundle(root))
    with pytest.warns(UserWarning, match="truncated"):
        answers = model.predict(["word " * 600, "a short text", "word " * 600_000])
    assert [answer.truncated for answer in answers] == [True, False, True]
    assert answers[0].to_dict()["truncated"] is True


def test_rows_that_were_read_before_still_say_that_their_text_was_cut(root):
    model = massmerge.load(text_bundle(root))
    with pytest.warns(UserWarning, match="truncated"):
        rows = [model.read("word " * 600), model.read("a short text")]
    assert [answer.truncated for answer in model.predict(rows)] == [True, False]


@pytest.mark.parametrize("text", ["word " * 2_000_000, "w" * 9_000_000, " " * 8_000_000 + "word", "ü" * 5_000_000])
def test_a_tokenizer_is_never_given_more_than_can_fit(root, text, monkeypatch):
    model = massmerge.load(text_bundle(root))
    tokenizer = model.core.reader.processor
    given = []
    monkeypatch.setattr(type(tokenizer), "__call__", _hearing(type(tokenizer).__call__, given))
    with pytest.warns(UserWarning, match="truncated"):
        assert model.predict(text)[0].truncated
    assert given and max(map(len, given)) <= 100 * 512


def _hearing(call, given):
    def wrapped(self, *texts, **options):
        given.extend(texts)
        return call(self, *texts, **options)

    return wrapped


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_that_is_cut_has_the_tokens_that_the_tokenizer_would_have_kept(root, side):
    reader = massmerge.load(text_bundle(root)).core.reader
    reader.processor.truncation_side = side
    text = " ".join(f"free win{i % 7} meeting goal{i % 5}" for i in range(20_000))
    with pytest.warns(UserWarning, match="truncated"):
        row = reader.row(text)
    assert row["input_ids"].tolist() == reader.processor(text, truncation=True, max_length=512)["input_ids"]
