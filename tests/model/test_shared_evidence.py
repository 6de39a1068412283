"""Inputs of one source share evidence: within a call, from call to call, at both looks."""

import pytest
import torch

from answers import assert_same_answers, bert_rows, vit_images
from massmerge import InputError, Sessions
from massmerge.model.route.decide import cast_votes
from massmerge.routing import vote


def by_hand(model, rows, keys):
    """The best task of each input by the mean of the scores of all inputs with its key."""
    look = model.stages.first
    scores = cast_votes(look.voters, look.first_pass(model.core.batch(rows)), look.router).scores
    found = []
    for i, key in enumerate(keys):
        own = [j for j, other in enumerate(keys) if other == key and (key is not None or i == j)]
        together = vote([s[own].mean(0, keepdim=True) for s in scores])
        found.append(model.tasks[int(together.argmin())])
    return found


@pytest.mark.parametrize("batch_size", [3, 32])
def test_inputs_of_a_session_are_routed_by_the_mean_of_their_scores(bert, batch_size):
    rows = bert_rows(9)
    keys = ["x", "y", None, "x", "y", "z", "x", None, "y"]
    found = bert.predict(rows, session=keys, batch_size=batch_size)
    assert [p.task for p in found] == by_hand(bert, rows, keys)
    assert len({tuple(found[i].routing.residuals.values()) for i in (0, 3, 6)}) == 1
    alone = bert.predict([rows[2], rows[7]])
    assert_same_answers([found[2], found[7]], alone)


def test_one_key_stands_for_all_inputs(bert):
    rows = bert_rows(5)
    assert [p.task for p in bert.predict(rows, session="x")] == by_hand(bert, rows, ["x"] * 5)


def test_a_memory_lets_earlier_calls_count(bert):
    rows = bert_rows(6)
    memory = Sessions(decay=1.0)
    bert.predict(rows[:5], session="x", memory=memory)
    found = bert.predict(rows[5], session="x", memory=memory)[0]
    together = bert.predict(rows, session="x")[0]
    assert found.routing.residuals == pytest.approx(together.routing.residuals, abs=1e-4)
    assert bert.predict(rows[5], session="x")[0].routing.residuals != pytest.approx(found.routing.residuals, abs=1e-3)


def test_an_input_that_cannot_be_read_leaves_its_session_to_the_others(bert):
    rows = bert_rows(3)
    found = bert.predict([rows[0], object(), rows[1], rows[2]], session=["x", "x", "y", "x"], on_error="row")
    assert found[1].error and [p.task for i, p in enumerate(found) if i != 1] == by_hand(bert, rows, ["x", "y", "x"])


def test_what_the_second_look_sees_is_shared_too(load_vit):
    model = load_vit(unsure=1e9, candidates=1)
    images = vit_images(model, 4)
    found = model.predict(images, session=["x", "y", "x", "y"])
    deep = load_vit(site=[site.name for site in model.sites if site.name[0] == "O"], candidates=1)
    expected = deep.predict(images, session=["x", "y", "x", "y"])
    for one, other in zip(found, expected, strict=True):
        assert one.task == other.task
        assert one.routing.residuals == pytest.approx(other.routing.residuals, abs=1e-3)


def test_a_given_task_needs_no_session(bert):
    memory = Sessions()
    assert bert.predict(bert_rows(2), task="a", session="x", memory=memory)[0].task == "a"
    assert len(memory) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"session": ["x"]}, "more inputs than keys"), ({"session": "x", "route": "batch"}, "leave it out")],
)
def test_wrong_sessions_are_refused(bert, options, message):
    with pytest.raises(InputError, match=message):
        bert.predict(bert_rows(2), **options)


def test_nothing_of_an_input_is_remembered_but_sums_of_scores(bert):
    memory = Sessions()
    bert.predict(bert_rows(3), session="x", memory=memory)
    [table] = memory._tables.values()
    assert {name: type(value) for name, value in vars(table["x"]).items()} == {
        "total": torch.Tensor, "weight": float, "used": float,
    }  # fmt: skip
    assert table["x"].total.shape == (len(bert.voters), len(bert.tasks))
