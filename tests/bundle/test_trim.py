"""A bundle that something was added to gives up its smallest singular vectors to keep its budget."""

import shutil

import pytest
import torch

import massmerge
from massmerge.bundle.reader import Bundle
from massmerge.bundle.trim import drop_bytes, keep_budget
from massmerge.io.durable import link_tree
from massmerge.merging.verify import verify_bundle
from models import contents, image_bundle, text_bundle


@pytest.fixture
def linked(root, tmp_path):
    """A bundle whose files are shared with another one."""
    shutil.copytree(text_bundle(root), tmp_path / "whole")
    link_tree(tmp_path / "whole", tmp_path / "cut", leave_out=())
    return tmp_path / "whole", tmp_path / "cut"


def test_the_smallest_vectors_of_all_tasks_go_and_nothing_else_changes(linked):
    whole, cut = linked
    before, old = contents(whole), Bundle(whole)
    dropped = drop_bytes(Bundle(cut), 3000)
    new = Bundle(cut)
    assert contents(whole) == before
    assert verify_bundle(cut).ok
    assert old.counted_bytes - new.counted_bytes >= 3000
    assert 0 < dropped < 0.2
    kept = total = 0
    for task in old.tasks:
        for name in old.manifest["ranks"]:
            full, short = (b.task_file(task.name).factors(name) for b in (old, new))
            if full is not None:
                k = len(short.s)
                kept, total = kept + k, total + len(full.s)
                for a, b in zip(short, full.first(k), strict=True):
                    assert torch.equal(a, b)
    assert dropped == pytest.approx(1 - kept / total)


def test_the_energy_that_is_kept_is_told_anew(linked):
    whole, cut = linked
    drop_bytes(Bundle(cut), 3000)
    old, new = Bundle(whole), Bundle(cut)
    for position, task in enumerate(old.tasks):
        for row, name in enumerate(old.manifest["ranks"]):
            full, short = (b.task_file(task.name).factors(name) for b in (old, new))
            if full is None:
                continue
            lost = float(full.s.double().square().sum() - short.s.double().square().sum())
            expected = (
                float(old.statistics["energy"][row, position])
                - lost / float(old.statistics["norm"][row, position]) ** 2
            )
            assert float(new.statistics["energy"][row, position]) == pytest.approx(expected, abs=1e-5)
            assert new.manifest["ranks"][name][position] == len(short.s)


def test_answers_hardly_change(linked):
    whole, cut = linked
    drop_bytes(Bundle(cut), 3000)
    one, other = (massmerge.load(path).predict("win a free prize now", task="spam")[0] for path in (whole, cut))
    assert (one.label, one.score) == (other.label, pytest.approx(other.score, abs=0.05))


def test_a_bundle_that_would_give_up_too_much_keeps_everything(linked):
    _, cut = linked
    before = contents(cut)
    assert drop_bytes(Bundle(cut), Bundle(cut).counted_bytes // 2) == 0.0
    assert contents(cut) == before


def test_a_bundle_without_a_budget_is_left_alone(root, tmp_path):
    bundle = shutil.copytree(image_bundle(root), tmp_path / "bundle")
    before = contents(bundle)
    assert keep_budget(bundle) == 0.0
    assert contents(bundle) == before
