"""Whether subspaces can tell tasks apart, and what a merge says of those that cannot."""

import pytest
import torch

from massmerge import merge
from massmerge.merging.run import Silent
from massmerge.routing.separation import (
    _ALIKE,
    clearly_apart,
    delta_cosines,
    own_starts,
    random_adapters,
    routing_targets,
    separation,
    without_common,
    without_shared,
)
from models import FAMILIES, write_recipe, write_shifted


def basis(rank, width, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(width, rank, generator=generator))[0].mT.contiguous()


def test_a_subspace_overlaps_with_itself_wholly_and_with_its_complement_not_at_all():
    v = basis(16, 16, 0)
    found = separation([[v[:4], v[:4], v[4:12], v[:8]]])
    assert found.overlap[0, 1] == pytest.approx(1.0, abs=1e-5)
    assert found.overlap[0, 2] == pytest.approx(0.0, abs=1e-5)
    assert found.overlap[0, 3] == pytest.approx(1.0, abs=1e-5)  # the smaller one lies in the larger one
    assert torch.allclose(found.overlap, found.overlap.mT)


def test_the_overlap_is_the_mean_squared_cosine_of_the_principal_angles():
    a, b = basis(5, 20, 1), basis(7, 20, 2)
    cosines = torch.linalg.svdvals(a @ b.mT)
    assert separation([[a, b]]).overlap[0, 1] == pytest.approx(float(cosines.square().mean()), abs=1e-5)


def test_random_subspaces_overlap_as_chance_says():
    sites = [[basis(8, 256, 10 * i), basis(16, 256, 10 * i + 1)] for i in range(20)]
    found = separation(sites)
    assert found.chance[0, 1] == pytest.approx(16 / 256)
    assert found.overlap[0, 1] == pytest.approx(16 / 256, rel=0.1)
    assert found.random(0)
    assert not found.alike(0, 1)


def test_subspaces_that_share_what_all_inputs_share_are_neither_alike_nor_random():
    common = basis(2, 128, 0)

    def with_common(seed):
        own = basis(8, 128, seed)
        return torch.linalg.qr(torch.cat([common, own]).mT)[0].mT

    found = separation([[with_common(1), with_common(2)]])
    assert not found.alike(0, 1)
    assert not found.random(0)


def test_a_task_that_changes_nothing_at_a_site_overlaps_with_nothing():
    found = separation([[basis(4, 16, 0), torch.zeros(0, 16)]])
    assert found.overlap[0, 1] == found.chance[0, 1] == 0


def test_tasks_that_share_more_than_pairs_mostly_do_are_kin():
    shared, bases = basis(6, 128, 50), [basis(12, 128, seed) for seed in range(6)]
    for i in (1, 4):  # half of each is the same
        bases[i] = torch.linalg.qr(torch.cat([shared, bases[i][6:]]).mT)[0].mT
    kin = separation([bases]).kin()
    assert kin.nonzero().tolist() == [[1, 4], [4, 1]]
    assert not separation([[bases[1], bases[4]]]).kin().any()  # one pair, and nothing to compare it with
    assert not separation([[bases[0]]]).kin().any()


def test_tasks_of_one_expert_are_no_kin_of_each_other_and_count_once_in_the_median():
    bases = [basis(12, 128, seed) for seed in range(4)]
    found = separation([[*bases, bases[0], bases[0]]])
    assert not found.kin([0, 1, 2, 3, 0, 0]).any()
    assert found.kin().any()


def test_the_cosine_of_deltas_is_that_of_all_matrices_as_one_vector():
    torch.manual_seed(0)
    deltas = [[torch.randn(4, 5) * 3, torch.randn(6, 2)] for _ in range(3)]
    flat = [torch.cat([d.flatten() for d in own]).double() for own in deltas]
    expected = torch.stack([torch.stack([a @ b / (a.norm() * b.norm()) for b in flat]) for a in flat])

    def cosine(i):
        own = [task[i].flatten() / task[i].norm() for task in deltas]
        return torch.stack([torch.stack([a @ b for b in own]) for a in own])

    norm = torch.tensor([[task[i].norm() for task in deltas] for i in range(2)])
    found = delta_cosines(torch.stack([cosine(0), cosine(1)]), norm, torch.ones(2, 3))
    assert torch.allclose(found, expected, atol=1e-5)


def test_tasks_of_one_expert_have_the_first_of_them_as_their_target():
    similarity = torch.eye(5)
    for i, j in [(1, 3), (1, 4), (3, 4)]:
        similarity[i, j] = similarity[j, i] = 0.9999
    similarity[0, 2] = similarity[2, 0] = 0.9  # much alike, and yet another expert
    assert routing_targets(similarity) == [0, 1, 2, 1, 1]


def test_adapters_look_random_beside_full_fine_tunes_that_do_not():
    shared = basis(6, 128, 50)
    learned = [torch.linalg.qr(torch.cat([shared, basis(6, 128, seed)]).mT)[0].mT for seed in range(2)]
    found = separation([[*learned, basis(12, 128, 7), basis(12, 128, 8)]])
    assert random_adapters(found, ["full", "full", "adapter", "adapter"]) == [2, 3]
    assert random_adapters(found, ["adapter", "adapter", "full", "full"]) == []


def test_adapters_of_one_start_have_none_of_their_own():
    shared = basis(8, 64, 1)
    moved = torch.linalg.qr((shared + 0.01 * torch.randn(8, 64)).mT)[0].mT
    found = separation([[basis(8, 64, 0), shared, moved, basis(8, 64, 2)]])
    assert own_starts(found, ["adapter", "adapter", "adapter", "full"]) == [0]


def test_directions_that_alike_tasks_share_are_taken_out():
    v = basis(14, 64, 3)
    shared, own = v[:8], [v[8:10], v[10:12], v[12:14]]
    found = without_common([torch.cat([shared, rows]) for rows in own])
    for rows, left in zip(own, found, strict=True):
        assert torch.allclose(left.mT @ left, rows.mT @ rows, atol=1e-5)
        assert torch.allclose(left @ left.mT, torch.eye(2), atol=1e-5)


def test_subspaces_that_are_not_alike_stay_as_they_are():
    bases = [basis(8, 64, seed) for seed in range(3)]
    assert all(a is b for a, b in zip(without_common(bases), bases, strict=True))


@pytest.mark.parametrize("rank", [17, 22])
def test_subspaces_that_share_much_because_they_are_large_stay_as_they_are(rank):
    """What is left of each would be the same: the rest of the space, in which all tasks have equal residuals."""
    bases = [basis(rank, 32, seed) for seed in range(3)]
    assert separation([bases]).overlap.mean() > 0.5
    assert all(a is b for a, b in zip(without_common(bases), bases, strict=True))


def test_tasks_that_share_everything_keep_nothing():
    v = basis(4, 32, 0)
    assert [len(left) for left in without_common([v, v.clone(), v.clone()])] == [0, 0, 0]


class Heard(Silent):
    """Progress that remembers the warnings."""

    def __init__(self):
        self.warnings = []

    def warning(self, problem):
        self.warnings.append(problem)


def merged(folder, shifts):
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(folder / "base")
    for name, shift in shifts(base).items():
        write_shifted(folder / name, "bert", base, shift)
    heard = Heard()
    merge(write_recipe(folder, list(shifts(base)), rank=4), folder / "out", workers=1, progress=heard)
    return [str(problem) for problem in heard.warnings]


def of_low_rank(base, left, right):
    """Updates of rank 2; the seed of the right factors is that of the directions which the inputs are projected on."""
    shift = {}
    for number, (name, value) in enumerate(base.named_parameters()):
        if value.ndim == 2:
            b = torch.randn(value.shape[0], 2, generator=torch.Generator().manual_seed(1000 * left + number))
            a = torch.randn(2, value.shape[1], generator=torch.Generator().manual_seed(1000 * right + number))
            shift[name] = 0.05 * b @ a
    return shift


def test_a_merge_warns_of_updates_that_change_the_same_directions(tmp_path):
    found = merged(tmp_path, lambda base: {"a": of_low_rank(base, 1, 9), "b": of_low_rank(base, 2, 9)})
    assert len(found) == 1
    assert "a and b" in found[0]
    assert "mass calibrate" in found[0]


def test_a_merge_of_two_tasks_with_one_expert_says_so_and_speaks_of_no_random_start(tmp_path):
    def shifts(base):
        one = of_low_rank(base, 1, 3)
        return {"a": one, "b": of_low_rank(base, 2, 4), "c": one}

    found = merged(tmp_path, shifts)
    assert len(found) == 1
    assert "a, c have the same expert" in found[0]
    assert "start" not in found[0]


def test_a_merge_of_updates_that_differ_warns_of_nothing(tmp_path):
    assert merged(tmp_path, lambda base: {"a": of_low_rank(base, 1, 3), "b": of_low_rank(base, 2, 4)}) == []


def test_what_is_clearly_apart_is_so_by_every_pair_and_alike_tasks_never_are():
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(12, 96, generator=generator)
    for share in (0.0, 0.2, 0.5, 1.0, 4.0):
        bases = [
            torch.linalg.qr((share * start + torch.randn(12, 96, generator=generator)).mT).Q.mT.contiguous()
            for _ in range(6)
        ]
        exact = separation([bases]).overlap[~torch.eye(6, dtype=torch.bool)].mean()
        assert clearly_apart(bases) == bool(exact < 0.8 * _ALIKE) or abs(exact - 0.8 * _ALIKE) < 0.1
        assert not (clearly_apart(bases) and exact > _ALIKE)
    assert clearly_apart([torch.eye(96)[:12], torch.eye(96)[12:20], torch.zeros(0, 96)])
    assert not clearly_apart([torch.eye(96)[:12]] * 3)


def test_many_tasks_lie_to_each_other_as_a_product_of_each_two_says(monkeypatch):
    monkeypatch.setattr("massmerge.routing.separation._ROWS", 7)  # two or three tasks at a time
    bases = [basis(rank, 24, seed) for seed, rank in enumerate((3, 2, 3, 3, 1))]
    overlap = separation([bases]).overlap
    for i, a in enumerate(bases):
        for j, b in enumerate(bases):
            expected = (a @ b.mT).square().sum() / min(len(a), len(b))
            assert overlap[i, j] == pytest.approx(float(expected), abs=1e-5)
    assert overlap.equal(overlap.mT)


def test_what_half_of_the_tasks_share_goes_whether_they_are_alike_or_not():
    torch.manual_seed(0)
    rows = torch.linalg.qr(torch.randn(24, 13)).Q.mT
    shared, own = rows[:1], rows[1:].split(3)
    bases = [torch.cat([shared, own[0]]), torch.cat([shared, own[1]]), torch.cat([shared, own[2]]), own[3]]
    assert all(a is b for a, b in zip(without_common(bases), bases, strict=True))
    for left, expected in zip(without_shared(bases), own, strict=True):
        assert torch.allclose(left.mT @ left, expected.mT @ expected, atol=1e-5)
