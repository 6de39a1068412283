"""Texts in groups of similar length, against the same batch padded to its longest."""

import pytest
import torch

import massmerge
from answers import assert_same_answers
from massmerge.model.speed import lengths
from massmerge.model.speed.lengths import length_groups, trimmed
from models import FAMILIES, family_bundle, rows_of

LENGTHS = [3, 9, 1, 5, 9, 2]


def mixed_rows(name):
    """Inputs of different lengths, as ready tensors."""
    rows = rows_of(FAMILIES[name].make_inputs(len(LENGTHS)))
    return [{key: tensor[:length] for key, tensor in row.items()} for row, length in zip(rows, LENGTHS, strict=True)]


def batch_of(sizes):
    mask = torch.tensor([[1] * size + [0] * (max(sizes) - size) for size in sizes])
    return {"input_ids": torch.arange(mask.numel()).view_as(mask), "attention_mask": mask}


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(lengths, "_LEAST", 2)


def test_groups_hold_every_row_once_and_the_longest_come_first(small_groups):
    groups = length_groups(batch_of(LENGTHS))
    assert [sorted(group) for group in groups] == [[1, 4], [0, 3], [2, 5]]


def test_a_batch_without_padding_stays_as_it_is(small_groups):
    assert length_groups(batch_of([4] * 6)) == [list(range(6))]


def test_a_few_rows_are_divided_where_they_have_many_tokens():
    sizes = [40, 48, 34, 46, 36, 44, 38, 42]
    assert [sorted(group) for group in length_groups(batch_of(sizes))] == [[1, 3, 5, 7], [0, 2, 4, 6]]
    assert len(length_groups(batch_of([size // 8 for size in sizes]))) == 1


def test_only_padding_is_cut_off():
    batch = batch_of([2, 5, 3])
    found = trimmed(batch, [2, 0])
    assert found["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert found["input_ids"].tolist() == batch["input_ids"][[2, 0], :3].tolist()


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_answers_and_routings_are_those_of_the_padded_batch(root, monkeypatch, small_groups, name):
    rows = mixed_rows(name)
    model = massmerge.load(family_bundle(root, name))
    found, embedded = model.predict(rows), model.embed(rows)
    monkeypatch.setenv("MASS_PLAIN", "1")
    plain = massmerge.load(family_bundle(root, name))
    assert_same_answers(found, plain.predict(rows))
    torch.testing.assert_close(embedded, plain.embed(rows), atol=1e-5, rtol=1e-4)
