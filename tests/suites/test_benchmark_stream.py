"""The benchmark of the stream compares with rebuilding as it goes through all batches, not those it is timed on."""

from pathlib import Path

import pytest


@pytest.fixture
def answer_cost(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import answer_cost

    return answer_cost


def test_models_of_a_batch_with_few_sets_are_there_in_the_next(answer_cost):
    few, many = [["a"], ["b"], ["a", "b"]], [[name] for name in "abcdefg"]
    assert answer_cost.models_built([few, few]) == {1: 2, 2: 1}
    assert answer_cost.models_built([few, many, few]) == {1: 2 + 5 + 2, 2: 2}


def test_the_time_of_a_batch_is_that_of_its_passes_and_of_the_models_that_the_whole_stream_builds(answer_cost):
    few = [["a"], ["b"]]
    other = answer_cost.Rebuilding.__new__(answer_cost.Rebuilding)
    other.seconds = {1: [2.0, 2.0]}  # two models in the one batch that was timed
    assert other.seconds_a_batch(4.5, [few] * 4, 4) == 0.5 + 2 * 2.0 / 4
