"""The benchmark of the stream compares with rebuilding as it goes through all batches, not those it is timed on."""

from pathlib import Path

import pytest


@pytest.fixture
def rebuilding(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import rebuilding

    return rebuilding


def test_models_of_a_batch_with_few_sets_are_there_in_the_next(rebuilding):
    few, many = [["a"], ["b"], ["a", "b"]], [[name] for name in "abcdefg"]
    assert rebuilding.models_built([few, few]) == {1: 2, 2: 1}
    assert rebuilding.models_built([few, many, few]) == {1: 2 + 5 + 2, 2: 2}


def test_the_time_of_a_batch_is_that_of_its_passes_and_of_the_models_that_the_whole_stream_builds(rebuilding):
    few = [["a"], ["b"]]
    other = rebuilding.Rebuilding.__new__(rebuilding.Rebuilding)
    other.seconds = {1: [2.0, 2.0]}  # two models in the one batch that was timed
    assert other.seconds_a_batch(4.5, [few] * 4, 4) == 0.5 + 2 * 2.0 / 4
