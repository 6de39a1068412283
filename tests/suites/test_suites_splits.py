"""The suites' splits: stratified, the same for the same seed, and never crossed by duplicates."""

import io
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from benchmarks.suites.near_duplicates import image_groups, normalise, text_groups
from benchmarks.suites.splits import SPLITS, Caps, draw, make_split, read_split, without_repeats, write_task
from massmerge.errors import InputError

SMALL = Caps(train=60, validation=20, test=30, least_test=10)
WORDS = [
    "river",
    "stone",
    "engine",
    "pepper",
    "violin",
    "market",
    "winter",
    "planet",
    "doctor",
    "bridge",
    "copper",
    "garden",
    "silver",
    "hammer",
    "window",
]


def _sentence(seed, words=12):
    random = np.random.default_rng(seed)
    return " ".join(f"{random.choice(WORDS)}{''.join(random.choice(list('abcdefgh'), 3))}" for _ in range(words))


def _png(array):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def _picture(seed, size=32):
    small = np.random.default_rng(seed).integers(0, 255, (8, 8), dtype=np.uint8)
    return Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC)


def _parts(split):
    return {name: set(getattr(split, name).tolist()) for name in SPLITS}


@st.composite
def grouped_rows(draw_from):
    sizes = draw_from(st.lists(st.integers(1, 6), min_size=60, max_size=120))
    kinds = draw_from(st.lists(st.sampled_from("ab"), min_size=len(sizes), max_size=len(sizes)))
    groups = np.repeat(np.arange(len(sizes)), sizes)
    labels = [kinds[group] for group in groups]
    return (labels, groups) if 30 <= labels.count("a") <= len(labels) - 30 else (["a", "b"] * 60, np.arange(120))


@given(grouped_rows(), st.integers(0, 1000))
def test_no_group_and_no_row_stands_in_two_splits(rows, seed):
    labels, groups = rows
    split = make_split(labels, groups, seed, SMALL)
    held = {name: {int(groups[row]) for row in part} for name, part in _parts(split).items()}
    assert not (held["train"] & held["test"] or held["train"] & held["validation"] or held["validation"] & held["test"])
    assert all(len(set(getattr(split, name).tolist())) == len(getattr(split, name)) for name in SPLITS)


@given(grouped_rows(), st.integers(0, 1000))
def test_no_split_is_larger_than_its_cap(rows, seed):
    split = make_split(*rows, seed, SMALL)
    assert len(split.train) <= SMALL.train
    assert len(split.validation) <= SMALL.validation
    assert SMALL.least_test <= len(split.test) <= SMALL.test


@given(grouped_rows(), st.integers(0, 1000))
def test_the_same_seed_gives_the_same_split(rows, seed):
    first, second = (make_split(*rows, seed, SMALL) for _ in range(2))
    assert all(np.array_equal(getattr(first, name), getattr(second, name)) for name in SPLITS)


def test_another_seed_gives_another_split():
    labels, groups = ["a", "b"] * 100, np.arange(200)
    assert _parts(make_split(labels, groups, 0, SMALL)) != _parts(make_split(labels, groups, 1, SMALL))


def test_labels_keep_their_proportions_in_every_split():
    labels = ["a"] * 600 + ["b"] * 300 + ["c"] * 100
    split = make_split(labels, np.arange(1000), 0, Caps(400, 100, 200, 50))
    for name in SPLITS:
        rows = getattr(split, name)
        shares = [np.mean([labels[row] == label for row in rows]) for label in "abc"]
        assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.011)


def test_a_group_that_is_larger_than_a_quota_goes_to_train():
    labels = ["a"] * 200
    groups = np.concatenate([np.zeros(50, dtype=np.int64), np.arange(1, 151)])
    split = make_split(labels, groups, 0, Caps(150, 20, 30, 10))
    assert set(range(50)) <= _parts(split)["train"]


def test_too_few_rows_for_a_test_are_refused():
    with pytest.raises(InputError, match="only 15 rows"):
        make_split(["a"] * 15, np.arange(15), 0, SMALL)


def test_a_label_that_cannot_stand_in_all_splits_is_refused():
    with pytest.raises(InputError, match="'rare' has too few rows"):
        make_split(["a"] * 100 + ["rare"] * 2, np.arange(102), 0, SMALL)


def test_drawing_keeps_proportions_and_is_seeded():
    labels = ["a"] * 900 + ["b"] * 100
    rows = draw(labels, 100, 3)
    assert np.array_equal(rows, draw(labels, 100, 3))
    assert len(rows) == 100
    assert sum(labels[row] == "b" for row in rows) == 10


def test_texts_that_differ_in_a_word_share_a_group():
    texts = [_sentence(i) for i in range(40)]
    changed = texts[7] + " indeed"
    groups = text_groups([*texts, changed])
    assert groups[40] == groups[7]
    assert len(set(groups.tolist())) == 40


def test_case_punctuation_and_numbers_do_not_make_texts_different():
    assert normalise("Call 0906-170, NOW!") == normalise("call 12345 - 99 now")
    groups = text_groups(["You have won 1000 pounds, call now!", "you have WON 200 pounds - call now", _sentence(1)])
    assert groups[0] == groups[1] != groups[2]


def test_short_texts_are_compared_too():
    groups = text_groups(["Li", "Li", "Wu", ""])
    assert groups[0] == groups[1]
    assert len({groups[0], groups[2], groups[3]}) == 3


def test_texts_of_one_thread_share_a_group():
    groups = text_groups([_sentence(i) for i in range(4)], ["re: engines", "", "re: engines", ""])
    assert groups[0] == groups[2]
    assert len(set(groups.tolist())) == 3


@settings(max_examples=8)
@given(st.lists(st.integers(0, 15), min_size=2, max_size=30))
def test_near_duplicates_are_those_that_a_comparison_of_all_pairs_finds(seeds):
    texts = [_sentence(seed) + (" again" if place % 2 else "") for place, seed in enumerate(seeds)]
    groups = text_groups(texts)
    for i, first in enumerate(texts):
        for j, second in enumerate(texts):
            assert (groups[i] == groups[j]) == (_overlap(first, second) >= 0.7)


def _overlap(first, second):
    a, b = ({text[i : i + 5] for i in range(len(text) - 4)} for text in (f" {first} ", f" {second} "))
    return len(a & b) / len(a | b)


def test_images_that_were_scaled_or_brightened_share_a_group():
    pictures = [_picture(i) for i in range(30)]
    scaled = _picture(4, size=48)
    brighter = ImageEnhance.Brightness(pictures[9]).enhance(1.05)
    groups = image_groups([_png(np.asarray(p)) for p in [*pictures, scaled, brighter]])
    assert groups[30] == groups[4]
    assert groups[31] == groups[9]
    assert len(set(groups.tolist())) == 30


def test_images_of_one_shade_are_duplicates_only_if_they_are_the_same():
    black, white = (_png(np.full((8, 8), shade, dtype=np.uint8)) for shade in (0, 255))
    groups = image_groups([black, white, black])
    assert groups[0] == groups[2] != groups[1]


def test_of_repeated_rows_the_first_is_kept_and_contradictions_are_dropped():
    values = ["one", "two", "One!", "three", "three", ""]
    assert without_repeats(values, ["x", "y", "x", "x", "y", "x"]).tolist() == [0, 1]


def test_a_task_is_written_with_its_counts_and_checksums(tmp_path):
    texts = [_sentence(i) for i in range(200)]
    labels = ["even" if i % 2 == 0 else "odd" for i in range(200)]
    data = write_task(tmp_path / "t", "text", texts, labels, source={"from": "here"}, licence="MIT", caps=SMALL)
    assert data == json.loads((tmp_path / "t" / "data.json").read_text())
    assert data["classes"] == ["even", "odd"]
    for part in SPLITS:
        table = pq.read_table(tmp_path / "t" / f"{part}.parquet")
        assert table.column_names == ["text", "label"]
        assert len(table) == data["rows"][part]
        assert all(
            labels[texts.index(text)] == label
            for text, label in zip(*read_split(tmp_path / "t", part, "text"), strict=True)
        )


def test_writing_a_task_twice_gives_the_same_bytes(tmp_path):
    texts, labels = [_sentence(i) for i in range(120)], ["a", "b"] * 60
    sums = [
        write_task(tmp_path / name, "text", texts, labels, source={}, licence="MIT", seed=5, caps=SMALL)["sha256"]
        for name in ("one", "two")
    ]
    assert sums[0] == sums[1]


def test_a_task_that_is_there_is_left_as_it_is(tmp_path):
    texts, labels = [_sentence(i) for i in range(120)], ["a", "b"] * 60
    first = write_task(tmp_path / "t", "text", texts, labels, source={}, licence="MIT", caps=SMALL)
    assert write_task(tmp_path / "t", "text", ["other"], ["x"], source={}, licence="MIT", caps=SMALL) == first


def test_images_are_kept_as_their_bytes(tmp_path):
    images = [_png(np.asarray(_picture(i, 16))) for i in range(120)]
    write_task(tmp_path / "t", "image", images, ["a", "b"] * 60, source={}, licence="MIT", caps=SMALL)
    found, _ = read_split(tmp_path / "t", "test", "image")
    assert set(found) <= set(images)


def test_a_split_that_is_not_there_names_the_step_that_makes_it(tmp_path):
    with pytest.raises(InputError, match="Run the fetch step first"):
        read_split(tmp_path, "train", "text")
