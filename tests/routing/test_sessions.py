"""Sessions: evidence that inputs of one source share, and what is remembered of it."""

import gc

import pytest
import torch

from massmerge import InputError, Sessions
from massmerge.routing.sessions import all_together, session_batches


class Look:
    """Who gave scores."""


def scores(count, seed, voters=2, tasks=3):
    return list(torch.rand(voters, count, tasks, generator=torch.Generator().manual_seed(seed)).unbind(0))


def naive_mean(batches, decay):
    """The mean of all scores of a session, those of earlier batches less by `decay` for each input that came since."""
    total, weight, since = 0, 0, 0
    for batch in reversed(batches):
        for score in batch:
            total, weight = total + decay**since * score, weight + decay**since
        since += len(batch)
    return total / weight


@pytest.mark.parametrize("decay", [0.0, 0.7, 1.0])
def test_a_session_is_scored_by_the_decaying_mean_of_its_inputs(decay):
    sessions, look = Sessions(decay), Look()
    history = []
    for seed, count in enumerate((2, 1, 4)):
        given = scores(count, seed)
        history.append(torch.stack(given, 1))
        found = torch.stack(sessions.combined(look, ["a"] * count, given), 1)
        expected = naive_mean(history, decay)
        assert all(torch.allclose(one, expected, atol=1e-6) for one in found)


def test_sessions_do_not_touch_each_other_nor_inputs_without_one():
    sessions, look, given = Sessions(), Look(), scores(4, 0)
    found = sessions.combined(look, ["a", None, "b", "a"], given)
    for own, given_of in zip(found, given, strict=True):
        assert torch.equal(own[[1, 2]], given_of[[1, 2]])
        assert torch.allclose(own[0], given_of[[0, 3]].mean(0)) and torch.equal(own[0], own[3])


def test_scores_that_are_not_finite_stay_alone():
    sessions, look, given = Sessions(), Look(), scores(2, 0)
    given[0][0, 0] = torch.nan
    found = sessions.combined(look, ["a", "a"], given)
    assert torch.equal(found[0][1], given[0][1]) and bool(found[0][0].isnan().any())
    assert all(bool(s.isfinite().all()) for s in sessions.combined(look, ["a"], scores(1, 1)))


def test_a_session_is_forgotten_when_it_expires():
    now = [0.0]
    sessions, look, given = Sessions(expiry=10, clock=lambda: now[0]), Look(), scores(1, 1)
    sessions.combined(look, ["a"], scores(1, 0))
    now[0] = 9.0
    assert len(sessions) == 1
    now[0] = 11.0
    assert torch.equal(sessions.combined(look, ["a"], given)[0], given[0])


def test_the_least_recently_used_session_makes_room():
    sessions, look = Sessions(limit=2), Look()
    for key in ("a", "b", "a", "c"):
        sessions.combined(look, [key], scores(1, 0))
    given = scores(1, 1)
    assert len(sessions) == 2
    assert not torch.equal(sessions.combined(look, ["a"], given)[0], given[0])
    assert torch.equal(sessions.combined(look, ["b"], given)[0], given[0])


def test_another_look_has_sums_of_its_own_which_end_with_it():
    sessions, first, given = Sessions(), Look(), scores(1, 1)
    sessions.combined(first, ["a"], scores(1, 0))
    assert torch.equal(sessions.combined(Look(), ["a"], given)[0], given[0])
    del first
    gc.collect()
    assert len(sessions) == 0


def test_clear_forgets_everything():
    sessions, look = Sessions(), Look()
    sessions.combined(look, ["a"], scores(1, 0))
    sessions.clear()
    assert len(sessions) == 0


@pytest.mark.parametrize("options", [{"decay": 1.1}, {"decay": -0.1}, {"expiry": 0}, {"limit": 0}])
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(InputError, match="decay is from 0 to 1"):
        Sessions(**options)


@pytest.mark.parametrize(
    ("keys", "size", "expected"),
    [
        ("aabbcc", 4, ["aabb", "cc"]),
        ("aabbbc", 4, ["aa", "bbbc"]),
        ("aaaaab", 4, ["aaaa", "ab"]),
        ("abcdef", 4, ["abcd", "ef"]),
    ],
)
def test_batches_end_where_sessions_do_if_they_fit(keys, size, expected):
    found = list(session_batches(range(len(keys)), keys and list(keys), size))
    assert ["".join(own) for own, _ in found] == expected
    assert [item for _, items in found for item in items] == list(range(len(keys)))


def test_inputs_without_a_session_are_batched_as_always_and_not_read_ahead():
    read = []
    batches = session_batches((read.append(i) or i for i in range(5)), None, 2)
    assert next(batches) == ([None, None], [0, 1]) and read == [0, 1]
    assert [items for _, items in batches] == [[2, 3], [4]]


@pytest.mark.parametrize(("keys", "message"), [("ab", "more inputs than keys"), ("abcd", "more keys than inputs")])
def test_each_input_needs_its_key(keys, message):
    with pytest.raises(InputError, match=message):
        list(session_batches(range(3), list(keys), 2))


def test_inputs_of_a_session_are_answered_one_after_the_other_and_given_back_in_their_order():
    asked = []

    def answer(items, session):
        asked.extend(zip(items, session, strict=True))
        return [item * 10 for item in items]

    assert all_together(range(5), ["a", None, "b", "a", "b"], answer) == [0, 10, 20, 30, 40]
    assert asked == [(0, "a"), (3, "a"), (1, None), (2, "b"), (4, "b")]
