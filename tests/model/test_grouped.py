"""Batched products of all segments against the loop over them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from massmerge.model.second_pass import modules
from massmerge.model.second_pass.grouped import grouped_updates, make_groups
from massmerge.model.second_pass.updates import LowRankChange
from models import FAMILIES


def one_update(ranks, m, n):
    core = torch.rand(sum(ranks)) if len(ranks) == 1 else torch.randn(sum(ranks), sum(ranks))
    return LowRankChange(tuple(torch.randn(m, k) for k in ranks), core, tuple(torch.randn(k, n) for k in ranks))


@given(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 4), max_size=3)), min_size=1, max_size=5),
    st.integers(0, 2),
)
def test_groups_give_what_a_loop_over_the_segments_gives(segments, more):
    """Segments of any sizes; sets of one task, of several, or without an update here."""
    updates = [one_update(ranks, 5, 7) if ranks else None for _, ranks in segments]
    stops = torch.tensor([rows for rows, _ in segments]).cumsum(0).tolist()
    bounds = list(zip([0, *stops[:-1]], stops, strict=True))
    x = torch.randn(stops[-1], *[2] * more, 7)
    found = grouped_updates(x, updates, make_groups(bounds, x.device))
    if found is None:
        assert not any(updates)
        return
    expected = torch.zeros(*x.shape[:-1], 5)
    for (start, stop), update in zip(bounds, updates, strict=True):
        if update is not None:
            expected[start:stop] += x[start:stop] @ update.dense().mT
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_there_are_at_most_twice_as_many_groups_as_segments():
    groups = make_groups([(0, 1), (1, 2), (2, 100)], torch.device("cpu"))
    assert len(groups.owners) <= 6
    assert groups.taken[groups.places].tolist() == list(range(100))


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_mixed_batch_in_groups_has_the_answers_of_the_loop(load_vit, monkeypatch, top_k):
    model, inputs = load_vit(top_k=top_k, threshold=0.1), FAMILIES["vit"].make_inputs(7)
    expected = model.embed(inputs)
    assert len({tuple(r.selected) for r in model.route(inputs)}) > 1
    monkeypatch.setattr(modules, "grouped_here", lambda device, segments: segments > 1)
    assert torch.allclose(model.embed(inputs), expected, atol=1e-5)
