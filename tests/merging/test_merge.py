"""What a merge writes, against dense and obviously right computations of the same."""

import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModel

import naive
from massmerge import Bundle, merge
from massmerge.bundle.layout import FIXED
from massmerge.cli.main import main
from models import FAMILIES, contents, read_deltas, write_family, write_recipe, write_shifted

TASKS = {"red": 2, "green": 3, "blue": 2}


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    """A base and three experts of it."""
    folder = tmp_path_factory.mktemp("bert")
    write_family(folder, "bert", TASKS)
    return folder


@pytest.fixture(scope="module")
def alike(tmp_path_factory) -> Path:
    """Three experts, of which `twin` changes almost what `first` changes."""
    folder = tmp_path_factory.mktemp("alike")
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(folder / "base")
    torch.manual_seed(5)
    shifts = [{key: torch.randn(value.shape) * 0.02 for key, value in base.state_dict().items()} for _ in range(3)]
    write_shifted(folder / "first", "bert", base, shifts[0])
    write_shifted(
        folder / "twin", "bert", base, {key: 1.2 * shifts[0][key] + 0.2 * shifts[1][key] for key in shifts[0]}
    )
    write_shifted(folder / "other", "bert", base, shifts[2])
    return folder


def build(folder: Path, out: Path, tasks=tuple(TASKS), **options) -> Bundle:
    recipe = write_recipe(folder, list(tasks), name=f"{out.name}.yaml", **options)
    return Bundle(merge(recipe, out, workers=1))


def matrices(bundle: Bundle) -> list[tuple[str, str, int]]:
    return [(task.name, name, ranks[i]) for name, ranks in bundle.ranks.items() for i, task in enumerate(bundle.tasks)]


def test_stored_factors_are_the_truncated_svds_of_the_deltas(family, tmp_path):
    bundle = build(family, tmp_path / "out")
    _, deltas = read_deltas(family, "bert", list(TASKS))
    assert len(matrices(bundle)) == 3 * 15
    for task, name, k in matrices(bundle):
        u, s, v = bundle.factors(task, name)
        assert s.shape == (k,)
        assert naive.relative_error((u * s) @ v, naive.truncated_product(deltas[task][name], k)) < 1e-4
        assert naive.relative_error(s, naive.svd(deltas[task][name], k)[1]) < 1e-4
        assert torch.dist(u.T @ u, torch.eye(k)) < 1e-4 and torch.dist(v @ v.T, torch.eye(k)) < 1e-4


def test_tensors_without_factors_are_stored_exactly(family, tmp_path):
    bundle = build(family, tmp_path / "out")
    experts = {task: load_file(family / task / "model.safetensors") for task in TASKS}
    vectors = [name for name, value in load_file(family / "base/model.safetensors").items() if value.dim() < 2]
    assert len(vectors) > 10
    for task in TASKS:
        assert all(torch.equal(bundle.whole(task, name), experts[task][f"bert.{name}"]) for name in vectors)


def test_the_base_in_the_bundle_is_the_base(family, tmp_path):
    bundle = build(family, tmp_path / "out")
    ours, theirs = (AutoModel.from_pretrained(f).state_dict() for f in (bundle.path / "base", family / "base"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_kept_energy_is_that_of_the_truncation(family, tmp_path):
    bundle = build(family, tmp_path / "out")
    _, deltas = read_deltas(family, "bert", list(TASKS))
    for row, (name, ranks) in enumerate(bundle.ranks.items()):
        for i, task in enumerate(TASKS):
            values = torch.linalg.svdvals(deltas[task][name].double()).square()
            share = float(values[: ranks[i]].sum() / values.sum())
            assert float(bundle.statistics["energy"][row, i]) == pytest.approx(share, abs=1e-4)
            assert float(bundle.statistics["norm"][row, i]) == pytest.approx(float(deltas[task][name].norm()), rel=1e-4)


def test_a_tensor_that_no_expert_changed_is_not_stored(tmp_path):
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(tmp_path / "base")
    name = "encoder.layer.1.output.dense.weight"
    write_shifted(tmp_path / "one", "bert", base, {name: torch.randn(32, 64)})
    bundle = build(tmp_path, tmp_path / "out", ["one"])
    assert set(bundle.headers["one"]) == {f"{name}.u", f"{name}.s", f"{name}.v"}
    assert {n: ranks for n, ranks in bundle.ranks.items() if ranks != [0]}.keys() == {name}


def test_an_expert_in_half_precision_stores_nothing_where_it_was_not_trained(tmp_path):
    base = FAMILIES["bert"].make_base()
    base.save_pretrained(tmp_path / "base")
    name = "encoder.layer.0.output.dense.weight"
    write_shifted(tmp_path / "one", "bert", base, {name: torch.randn(32, 64)})
    FAMILIES["bert"].expert.from_pretrained(tmp_path / "one").bfloat16().save_pretrained(tmp_path / "one")
    bundle = build(tmp_path, tmp_path / "out", ["one"])
    assert set(bundle.headers["one"]) == {f"{name}.u", f"{name}.s", f"{name}.v"}


@pytest.mark.parametrize(("rank", "of_32"), [("1/T", 10), (7, 7)])
def test_the_rank_rule_decides_how_many_triplets_are_kept(family, tmp_path, rank, of_32):
    bundle = build(family, tmp_path / "out", rank=rank)
    assert set(bundle.ranks["encoder.layer.0.attention.self.query.weight"]) == {of_32}


@pytest.mark.parametrize("rule", [{"rank": "1/T"}, {"rank": 7}, {"rank": 0.5}, {"budget": 2.0}])
def test_a_matrix_with_fewer_rows_than_tasks_is_kept_whole_whatever_the_rank_rule(family, tmp_path, rule):
    name = "embeddings.token_type_embeddings.weight"
    bundle = build(family, tmp_path / "out", **rule)
    assert name not in bundle.ranks
    base, deltas = read_deltas(family, "bert", list(TASKS))
    for task in TASKS:
        assert torch.allclose(bundle.whole(task, name), base[name] + deltas[task][name], atol=1e-7)


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_share_of_energy_keeps_the_fewest_triplets_that_hold_it(family, tmp_path, share):
    bundle = build(family, tmp_path / "out", rank=share)
    _, deltas = read_deltas(family, "bert", list(TASKS))
    for task, name, k in matrices(bundle):
        energy = torch.linalg.svdvals(deltas[task][name].double()).square()
        assert energy[:k].sum() >= (share - 1e-6) * energy.sum()
        assert k == 1 or energy[: k - 1].sum() < (share + 1e-6) * energy.sum()


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_a_tsv_m_merge_is_a_checkpoint_that_equals_the_dense_one(tmp_path, name):
    recipe = write_family(tmp_path, name, TASKS, method="tsv_m")
    merged = AutoModel.from_pretrained(merge(recipe, tmp_path / "out", workers=1)).state_dict()
    base, deltas = read_deltas(tmp_path, name, list(TASKS))
    factored = 0
    for key, value in base.items():
        changes = [deltas[task][key] for task in TASKS]
        k = min(value.shape[0], value[0].numel()) // len(TASKS) if value.dim() >= 2 else 0
        if key.endswith(".weight") and k:
            flat = [change.flatten(1) for change in changes]
            expected = value + naive.tsv_merge([naive.svd(change, k) for change in flat]).reshape(value.shape)
            factored += 1
        else:
            expected = value + sum(changes) / len(TASKS)
        assert naive.relative_error(merged[key] - value, expected - value) < 1e-3, key
    assert factored >= 8


@pytest.mark.parametrize("redundancy", [{"metric": "cosine", "threshold": 0.3}, "none"])
def test_the_fixed_models_core_gives_tsv_m_of_the_tasks_that_the_filter_accepted(alike, tmp_path, redundancy):
    tasks = ["first", "twin", "other"]
    bundle = build(alike, tmp_path / "out", tasks, redundancy=redundancy, router={"first_pass": "fixed"})
    _, deltas = read_deltas(alike, "bert", tasks)
    cores = load_file(bundle.path / FIXED)
    assert cores.keys() == bundle.ranks.keys()
    for row, (name, ranks) in enumerate(bundle.ranks.items()):
        kept = [i for i in range(3) if bundle.statistics["accepted"][row, i]]
        stored = [bundle.factors(tasks[i], name) for i in kept]
        dense = naive.tsv_merge([naive.svd(deltas[tasks[i]][name], ranks[i]) for i in kept])
        assert naive.relative_error(naive.core_product(stored, cores[name]), dense) < 1e-3


def test_with_the_base_as_first_pass_no_fixed_model_is_stored(family, tmp_path):
    assert not (build(family, tmp_path / "out").path / FIXED).exists()


@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.3, 0.999])
@pytest.mark.parametrize("order", [("first", "twin", "other"), ("twin", "other", "first")])
def test_the_cosine_filter_leaves_out_what_a_dense_one_leaves_out(alike, tmp_path, order, threshold):
    bundle = build(alike, tmp_path / "out", order, redundancy={"metric": "cosine", "threshold": threshold})
    for row, name in enumerate(bundle.ranks):
        dense = [bundle.factors(task, name).dense() for task in order]
        assert bundle.statistics["accepted"][row].nonzero().flatten().tolist() == naive.distinct(dense, threshold), name
        assert torch.dist(bundle.statistics["cosine"][row].double(), naive.cosines(dense)) < 1e-4


def test_the_angle_filter_leaves_out_what_a_dense_one_leaves_out(alike, tmp_path):
    order, threshold = ("first", "twin", "other"), 0.02
    bundle = build(alike, tmp_path / "out", order, rank=4, redundancy={"metric": "angles", "threshold": threshold})
    found = set()
    for row, name in enumerate(bundle.ranks):
        dense = [bundle.factors(task, name).dense() for task in order]
        accepted: list[int] = []
        for i in range(3):
            if all(naive.principal_cosine(dense[i], dense[j]) <= threshold for j in accepted):
                accepted.append(i)
        assert bundle.statistics["accepted"][row].nonzero().flatten().tolist() == accepted, name
        found.add(tuple(accepted))
    assert len(found) > 1


def test_without_a_filter_every_task_is_in_the_fixed_model(alike, tmp_path):
    bundle = build(alike, tmp_path / "out", ("first", "twin", "other"), redundancy="none")
    assert bool(bundle.statistics["accepted"].all())


@pytest.mark.parametrize(("order", "left_out"), [(("first", "twin"), 1), (("twin", "first"), 1)])
def test_of_two_alike_tasks_the_one_that_stands_first_in_the_recipe_is_kept(alike, tmp_path, order, left_out):
    bundle = build(alike, tmp_path / "out", order)
    assert bundle.statistics["accepted"][:, left_out].sum() == 0
    assert bool(bundle.statistics["accepted"][:, 1 - left_out].all())


def test_the_same_recipe_gives_the_same_bytes_whatever_the_number_of_workers(family, tmp_path):
    recipe = write_recipe(family, list(TASKS), name="same.yaml", router={"first_pass": "fixed"})
    first, *others = (contents(merge(recipe, tmp_path / f"out{w}", workers=w)) for w in (1, 1, 2, 8))
    assert len(first) > 10 and all(other == first for other in others)


def test_a_static_merge_gives_the_same_bytes_whatever_the_number_of_workers(family, tmp_path):
    recipe = write_recipe(family, list(TASKS), name="static.yaml", method="tsv_m")
    first, second = (contents(merge(recipe, tmp_path / f"out{w}", workers=w)) for w in (1, 2))
    assert first == second


def test_the_same_experts_in_another_folder_at_another_time_give_the_same_bytes(family, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other" / "place"
    for folder in (one, other):
        for name, data in contents(family).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        (folder / "base" / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    os.utime(other / "red" / "model.safetensors", (1, 1))
    first, second = (contents(merge(f / "recipe.yaml", f / "out", workers=1)) for f in (one, other))
    assert first == second and "processor/vocab.txt" in first


def test_a_merge_that_a_person_stops_says_how_to_go_on(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("massmerge.cli.merge_steps.run_merge", stop)
    recipe = write_family(tmp_path, "bert", {"red": 2})
    result = CliRunner().invoke(main, ["merge", str(recipe), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "Run the same command to resume" in result.stderr
