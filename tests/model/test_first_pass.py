"""The first pass: activations at the voting sites, nothing behind the last of them."""

import pytest
import torch

import massmerge
from massmerge.model.route.first_pass import FirstPass, Voter, pool
from massmerge.model.trees import shared_copy
from massmerge.routing import find_sites
from models import FAMILIES, backbone_of, dense_expert, make_bundle, read_deltas, rows_of, with_options
from naive import distinct, svd, tsv_merge


def voters_of(base, *names):
    sites = {site.name: site for site in find_sites(base)}
    return [Voter(sites[name.partition(".")[0]], name.partition(".")[2]) for name in names]


def seen_by(model, module, inputs):
    """What a module of a model gets as its input."""
    found = []
    handle = model.get_submodule(module).register_forward_pre_hook(lambda _, args: found.append(args[0]))
    with torch.inference_mode():
        model(**inputs)
    handle.remove()
    return found[0]


LAYER = {
    "bert": "encoder.layer.1.intermediate.dense", "roberta": "encoder.layer.1.intermediate.dense",
    "distilbert": "transformer.layer.1.ffn.lin1", "modernbert": "layers.1.mlp.Wi", "vit": "layers.1.mlp.fc1",
    "dinov2": "encoder.layer.1.mlp.fc1", "clip": "encoder.layers.1.mlp.fc1", "gpt2": "h.1.mlp.c_fc",
    "llama": "layers.1.mlp.gate_proj", "t5": "block.1.layer.1.DenseReluDense.wi",
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_activations_of_the_base_are_those_of_a_whole_forward_pass(name):
    base, inputs = FAMILIES[name].make_base(), FAMILIES[name].make_inputs(3)
    part = base.encoder if name == "t5" else base
    expected = seen_by(part, LAYER[name], inputs)
    voters = voters_of(base, "M1.cls", "M1.mean", "M1.last", "M1.each")
    cls, mean, last, each = FirstPass(shared_copy(base), voters)(inputs)
    assert torch.allclose(last.rows, expected[:, -1], atol=1e-5)
    assert torch.allclose(cls.rows, expected[:, 0], atol=1e-5)
    assert torch.allclose(mean.rows, expected.mean(1), atol=1e-5)
    assert torch.allclose(each.rows, expected.flatten(0, 1), atol=1e-5)
    assert each.tokens.tolist() == [expected.shape[1]] * 3
    assert torch.allclose(each.pooled(), expected.mean(1), atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_behind_the_last_voting_site_is_called(name):
    base = FAMILIES[name].make_base()
    tree = shared_copy(base)
    first = FirstPass(tree, voters_of(base, "M0.mean", "A1.mean"))
    finished = []
    for path, module in tree.named_modules():
        module.register_forward_hook(lambda *_, path=path: finished.append(path))
    first(FAMILIES[name].make_inputs(2))
    behind = {m for s in find_sites(base) for m in s.modules if s.depth >= first.voters[-1].site.depth}
    assert finished
    assert not behind & set(finished)


def test_one_pass_gathers_the_activations_of_all_voters():
    base, inputs = FAMILIES["bert"].make_base(), FAMILIES["bert"].make_inputs(3)
    tree = shared_copy(base)
    first = FirstPass(tree, voters_of(base, "M1.mean", "A0.cls", "M0.mean"))
    calls = []
    tree.embeddings.register_forward_pre_hook(lambda *_: calls.append(1))
    found = first(inputs)
    assert len(calls) == 1
    for z, name in zip(found, ("M1.mean", "A0.cls", "M0.mean"), strict=True):
        alone = FirstPass(shared_copy(base), voters_of(base, name))(inputs)[0]
        assert torch.allclose(z.rows, alone.rows, atol=1e-6)


def test_the_last_token_is_the_last_that_is_no_padding_on_either_side():
    hidden, mask = torch.randn(3, 4, 5), torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]])
    assert torch.equal(pool(hidden, "last", mask, 3), hidden[[0, 1, 2], [1, 3, 2]])


def test_padding_does_not_count_in_the_mean():
    base = FAMILIES["bert"].make_base()
    first = FirstPass(shared_copy(base), voters_of(base, "M1.mean"))
    short = FAMILIES["bert"].make_inputs(1)
    padded = {k: torch.nn.functional.pad(v, (0, 5)) for k, v in short.items()}
    assert torch.allclose(first(padded)[0].rows, first(short)[0].rows, atol=1e-5)


def test_padding_is_no_token():
    base = FAMILIES["bert"].make_base()
    first = FirstPass(shared_copy(base), voters_of(base, "M1.each"))
    ids, mask = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]]), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = first({"input_ids": ids, "attention_mask": mask})[0]
    assert found.tokens.tolist() == [3, 5]
    alone = [
        first({"input_ids": ids[i : i + 1, :n], "attention_mask": mask[i : i + 1, :n]})[0] for i, n in ((0, 3), (1, 5))
    ]
    assert torch.allclose(found.rows, torch.cat([a.rows for a in alone]), atol=1e-5)
    values = torch.randn(8, 4)
    assert torch.allclose(found.averaged(values), torch.stack([values[:3].mean(0), values[3:].mean(0)]), atol=1e-6)


def test_the_mean_over_a_feature_map_is_over_its_places():
    hidden = torch.randn(2, 4, 5, 8)
    assert torch.allclose(pool(hidden, "mean", None, 2), hidden.mean((1, 2)), atol=1e-6)


def test_a_mask_of_no_real_token_gives_no_nan():
    found = pool(torch.ones(1, 3, 4), "mean", torch.zeros(1, 3, dtype=torch.long), 1)
    assert bool(torch.isfinite(found).all())


def test_the_first_pass_leaves_the_base_without_hooks():
    base = FAMILIES["bert"].make_base()
    FirstPass(shared_copy(base), voters_of(base, "M0.mean"))
    assert not any(m._forward_pre_hooks for m in base.modules())


def test_a_voter_is_named_by_site_and_token():
    base = FAMILIES["vit"].make_base()
    assert [v.name for v in voters_of(base, "M0.cls", "A1.mean")] == ["M0.cls", "A1.mean"]


# Through the base or through the fixed model, as the recipe says


@pytest.fixture(scope="module", params=["bert", "vit", "gpt2", "t5", "modernbert"])
def fixed(request, tmp_path_factory):
    """A family and a bundle of three of its tasks with the paper's first pass."""
    folder = tmp_path_factory.mktemp("fixed")
    router = {"first_pass": "fixed", "site": "M1", "token": "mean"}
    return request.param, make_bundle(folder, request.param, {"a": 2, "b": 3, "c": 4}, merge={"rank": 6}, router=router)


def site_of(name, model, inputs):
    inside = backbone_of(model, FAMILIES[name].base)
    inside = inside.encoder if name == "t5" else inside
    return seen_by(inside, LAYER[name], inputs).mean(1)


def test_the_fixed_first_pass_sees_the_activations_of_a_dense_fixed_model(fixed):
    name, bundle = fixed
    inputs = FAMILIES[name].make_inputs(3)

    def merge(found):  # the redundancy filter, then TSV-M
        deltas = [u @ torch.diag(s) @ v for u, s, v in found]
        return tsv_merge([found[i] for i in distinct(deltas, 0.3)])

    expected = site_of(name, dense_expert(bundle, name, ["a", "b", "c"], "a", merge), inputs)
    found = massmerge.load(bundle).activations(rows_of(inputs))[0]
    assert torch.allclose(found, expected, atol=1e-4)


def test_the_papers_residuals_are_those_of_a_naive_fixed_model_with_more_tasks_than_rows(tmp_path):
    tasks, site = ["a", "b", "c"], "encoder.layer.1.intermediate.dense"
    router = {"first_pass": "fixed", "site": "M1", "token": "mean", "candidates": 1}
    options = {"merge": {"rank": "1/T", "redundancy": "none"}, "router": router}
    bundle = make_bundle(tmp_path, "bert", dict.fromkeys(tasks, 2), **options)
    base, deltas = read_deltas(tmp_path, "bert", tasks)
    state, subspaces = {}, []
    for name, value in base.items():
        changes = [deltas[task][name].double() for task in tasks]
        k = min(value.shape) // len(tasks) if value.dim() == 2 else 0  # 0 for the two token types
        triplets = [svd(change, k) for change in changes] if k else []
        state[name] = value + (tsv_merge(triplets) if k else sum(changes) / len(tasks))
        if name == f"{site}.weight":
            subspaces = [v for _, _, v in triplets]
    fixed_model = FAMILIES["bert"].make_base()
    fixed_model.load_state_dict(state)
    inputs = FAMILIES["bert"].make_inputs(3)
    z = seen_by(fixed_model, site, inputs).mean(1).double()
    expected = torch.stack([(z - z @ v.mT @ v).norm(dim=1) for v in subspaces], 1)
    routings = massmerge.load(bundle).route(rows_of(inputs))
    found = torch.tensor([[r.residuals[task] for task in tasks] for r in routings], dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-4)


def test_the_base_first_pass_sees_the_activations_of_the_base(fixed, tmp_path):
    name, bundle = fixed
    inputs = FAMILIES[name].make_inputs(3)
    plain = with_options(bundle, tmp_path / "plain", router={"first_pass": "base"})
    base = FAMILIES[name].base.from_pretrained(bundle.parent / "base").eval()
    found = massmerge.load(plain).activations(rows_of(inputs))[0]
    assert torch.allclose(found, site_of(name, base, inputs), atol=1e-5)


def test_the_two_first_passes_differ(fixed, tmp_path):
    name, bundle = fixed
    rows = rows_of(FAMILIES[name].make_inputs(3))
    plain = with_options(bundle, tmp_path / "plain", router={"first_pass": "base"})
    assert not torch.allclose(massmerge.load(bundle).activations(rows)[0], massmerge.load(plain).activations(rows)[0])
