"""The second pass: base plus the update of each segment's set, against dense merges; and the cache of dense weights."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import massmerge
from massmerge.errors import InputError
from massmerge.io.sizes import parse_bytes
from massmerge.linalg.factors import Factors
from massmerge.model.second_pass.modules import (
    SubspaceConv,
    SubspaceEmbedding,
    SubspaceLinear,
    SubspaceNorm,
    SubspacePatches,
)
from massmerge.model.second_pass.segments import Segment, Segments, running
from massmerge.model.second_pass.updates import SetChanges
from massmerge.model.speed.patches import cuts_patches
from models import FAMILIES, dense_expert, family_bundle, logits_of, rows_of, with_options
from naive import relative_error, tsv_merge, weighted_tsv_merge

RANKS = {0: 2, 1: 3, 2: 1}


def factors_of(m, n, seed=0):
    """For each of three tasks the factors of an (m, n) delta."""
    found = {}
    for task, k in RANKS.items():
        torch.manual_seed(seed + task)
        u, v = torch.linalg.qr(torch.randn(m, k)).Q, torch.linalg.qr(torch.randn(n, k)).Q.mT
        found[task] = Factors(u, torch.rand(k) + 0.5, v)
    return found


def changes_of(tasks, factors=None, whole=None, base=None, variant="orthogonal", weights=None):
    """Changes of a set in a layer whose tensors are called weight and bias."""
    factors, whole = factors or {}, whole or {}
    return SetChanges(
        tasks,
        lambda t, name: factors.get(t) if name == "weight" else None,
        lambda t, name: whole.get(t) if name == "bias" else None,
        lambda name: base,
        variant,
        weights,
    )


def run(layer, x, *sets):
    """A layer on a batch of which each set has the same share."""
    each = len(x) // len(sets)
    parts = tuple(Segment(changes, i * each, (i + 1) * each) for i, changes in enumerate(sets))
    with torch.inference_mode(), running(Segments(parts, len(x))):
        return layer(x)


# Layers without matrices, and patches


@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_has_each_sets_own_scale_and_shift(bias):
    torch.manual_seed(0)
    layer = nn.LayerNorm(6, bias=bias)
    x = torch.randn(6, 4, 6)
    scales, shifts = torch.rand(2, 6), torch.randn(2, 6)
    sets = [
        SetChanges((t,), lambda t, n: None, lambda t, n: (scales if n == "weight" else shifts)[t] if t < 2 else None,
                   lambda name: None)
        for t in (0, 1, 2)
    ]  # fmt: skip
    found = run(SubspaceNorm(layer, "weight", "bias"), x, *sets)
    for t in range(3):
        scale = scales[t] if t < 2 else layer.weight
        shift = shifts[t] if t < 2 else layer.bias
        expected = torch.nn.functional.layer_norm(x[2 * t : 2 * t + 2], (6,), scale, shift, layer.eps)
        assert float((found[2 * t : 2 * t + 2] - expected).detach().abs().max()) < 1e-6


@pytest.mark.parametrize("tasks", [(0,), (0, 1)])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(2, 5, 3, stride=3),
        nn.Conv2d(2, 5, (2, 3), stride=(2, 3)),
        nn.Conv2d(2, 5, 3, stride=2, padding=1),
        nn.Conv3d(2, 5, 2, stride=2),
    ],
    ids=["patches of a line", "patches of an image", "overlapping", "patches of a volume"],
)
def test_a_convolution_is_that_of_the_dense_kernel(layer, tasks):
    shape = (4, 2, *(13, 9, 8)[: layer.weight.ndim - 2])  # a rim that no patch fills
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    changes = changes_of(tasks, factors_of(5, layer.weight[0].numel()))
    dense = layer.weight + changes.change("weight").update.dense().view_as(layer.weight)
    expected = type(layer)._conv_forward(layer, x, dense, layer.bias)
    kind = SubspacePatches if cuts_patches(layer) else SubspaceConv
    assert float((run(kind(layer, "weight", "bias"), x, changes) - expected).abs().max()) < 1e-5


# What a set changes in one matrix


@pytest.mark.parametrize("tasks", [(0, 1), (1, 2), (0, 1, 2)])
def test_the_update_of_a_set_is_the_tsv_merge_of_its_factors(tasks):
    factors = factors_of(12, 9)
    update = changes_of(tasks, factors).change("weight").update
    assert relative_error(update.dense(), tsv_merge([factors[t] for t in tasks])) < 1e-5


def test_the_update_of_one_task_is_its_delta_exactly():
    factors = factors_of(12, 9)
    assert torch.equal(changes_of((1,), factors).change("weight").update.core, factors[1].s)


def test_the_plain_variant_is_the_sum_of_the_deltas():
    factors = factors_of(12, 9)
    update = changes_of((0, 2), factors, variant="plain").change("weight").update
    assert relative_error(update.dense(), factors[0].dense() + factors[2].dense()) < 1e-6


@pytest.mark.parametrize("weights", [(0.6, 0.2), (0.2, 0.6), (0.4, 0.4)])
def test_the_weighted_variant_is_the_tsv_merge_of_singular_vectors_scaled_by_the_router_s_weights(weights):
    factors = factors_of(12, 9)
    update = changes_of((0, 2), factors, variant="weighted", weights=list(weights)).change("weight").update
    expected = weighted_tsv_merge([factors[0], factors[2]], weights)
    assert relative_error(update.dense(), expected) < 1e-5
    unweighted = tsv_merge([factors[0], factors[2]])
    assert (relative_error(expected, unweighted) < 1e-6) == (weights[0] == weights[1]), "only their ratio counts"


def test_the_mixture_is_the_sum_by_the_weights_as_shares_of_the_set():
    factors = factors_of(12, 9)
    update = changes_of((0, 2), factors, variant="mixture", weights=[0.6, 0.2]).change("weight").update
    assert relative_error(update.dense(), 0.75 * factors[0].dense() + 0.25 * factors[2].dense()) < 1e-6


@pytest.mark.parametrize("variant", ["orthogonal", "plain", "weighted"])
def test_a_task_that_leaves_the_matrix_alone_adds_nothing(variant):
    factors = factors_of(12, 9)
    both = changes_of((0, 1), {0: factors[0]}, variant=variant, weights=[0.3, 0.5]).change("weight").update
    assert relative_error(both.dense(), factors[0].dense()) < 1e-6


def test_identical_experts_merge_to_the_polar_factors_of_their_shared_bases():
    one = factors_of(12, 9)[1]
    update = changes_of((0, 1), {0: one, 1: one}).change("weight").update
    assert bool(torch.isfinite(update.core).all())
    assert relative_error(update.dense(), tsv_merge([one, one])) < 1e-5


def test_a_tensor_without_factors_is_the_mean_over_the_set():
    whole = {0: torch.ones(3), 1: torch.full((3,), 4.0)}
    assert changes_of((0, 1), whole=whole).change("bias").value.tolist() == [2.5] * 3


def test_a_task_without_a_value_of_its_own_counts_with_the_base_s():
    found = changes_of((0, 1), whole={0: torch.ones(3)}, base=torch.zeros(3)).change("bias").value
    assert found.tolist() == [0.5] * 3


def test_a_tensor_that_no_task_of_the_set_changes_stays_the_base_s():
    assert changes_of((0, 1), whole={2: torch.ones(3)}).change("bias") == (None, None)


# Layers on a mixed batch


def deltas(factors, *tasks):
    return tsv_merge([factors[t] for t in tasks]).float() if len(tasks) > 1 else factors[tasks[0]].dense()


@pytest.mark.parametrize("shape", [(6, 9), (6, 4, 9)])
def test_a_linear_layer_adds_to_each_segment_the_update_of_its_set(shape):
    layer, factors, x = nn.Linear(9, 12), factors_of(12, 9), torch.randn(shape)
    whole = {0: torch.randn(12), 1: torch.randn(12)}
    sets = [changes_of(tasks, factors, whole, layer.bias.detach()) for tasks in ((0,), (0, 1), (2,))]
    found = run(SubspaceLinear(layer, "weight", "bias", transposed=False), x, *sets)
    biases = [whole[0], (whole[0] + whole[1]) / 2, layer.bias]
    for i, (tasks, bias) in enumerate(zip(((0,), (0, 1), (2,)), biases, strict=True)):
        expected = nn.functional.linear(x[2 * i : 2 * i + 2], layer.weight + deltas(factors, *tasks), bias)
        assert torch.allclose(found[2 * i : 2 * i + 2], expected, atol=1e-5)


def test_a_transposed_layer_of_gpt2_is_updated_likewise():
    layer, factors, x = Conv1D(12, 9), factors_of(12, 9), torch.randn(2, 4, 9)
    sets = [changes_of((1,), factors), changes_of((0, 2), factors)]
    found = run(SubspaceLinear(layer, "weight", "bias", transposed=True), x, *sets)
    for i, tasks in enumerate([(1,), (0, 2)]):
        expected = x[i] @ (layer.weight + deltas(factors, *tasks).mT) + layer.bias
        assert torch.allclose(found[i], expected, atol=1e-5)


def test_a_layer_without_a_bias_takes_one_from_a_task():
    layer, x = nn.Linear(9, 12, bias=False), torch.randn(2, 9)
    bias = torch.randn(12)
    found = run(SubspaceLinear(layer, "weight", "bias", transposed=False), x, changes_of((0,), whole={0: bias}))
    assert torch.allclose(found, layer(x) + bias, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2}, {"bias": False}])
def test_a_convolution_adds_to_each_segment_the_update_of_its_set(options):
    layer, factors, x = nn.Conv2d(3, 8, 3, **options), factors_of(8, 27), torch.randn(2, 3, 7, 7)
    sets = [changes_of((1,), factors, {1: torch.ones(8)}), changes_of((0, 2), factors)]
    found = run(SubspaceConv(layer, "weight", "bias"), x, *sets)
    for i, tasks in enumerate([(1,), (0, 2)]):
        kernel = layer.weight + deltas(factors, *tasks).view_as(layer.weight)
        bias = torch.ones(8) if tasks == (1,) else layer.bias
        expected = nn.functional.conv2d(x[i : i + 1], kernel, bias, layer.stride, layer.padding, layer.dilation)
        assert torch.allclose(found[i : i + 1], expected, atol=1e-5)


def test_a_convolution_over_time_is_updated_likewise():
    layer, factors, x = nn.Conv1d(3, 8, 3), factors_of(8, 9), torch.randn(1, 3, 7)
    found = run(SubspaceConv(layer, "weight", "bias"), x, changes_of((0, 1), factors))
    kernel = layer.weight + deltas(factors, 0, 1).view_as(layer.weight)
    assert torch.allclose(found, nn.functional.conv1d(x, kernel, layer.bias), atol=1e-5)


def test_an_embedding_adds_to_each_segment_the_update_of_its_set():
    layer, factors, ids = nn.Embedding(20, 9), factors_of(20, 9), torch.randint(20, (2, 5))
    sets = [changes_of((1,), factors), changes_of((0, 2), factors)]
    found = run(SubspaceEmbedding(layer, "weight"), ids, *sets)
    for i, tasks in enumerate([(1,), (0, 2)]):
        assert torch.allclose(found[i], (layer.weight + deltas(factors, *tasks))[ids[i]], atol=1e-5)


# A whole backbone


@pytest.mark.parametrize("name", FAMILIES)
def test_no_dense_copy_of_the_backbone_is_made(root, name):
    model = massmerge.load(family_bundle(root, name))
    rows = rows_of(FAMILIES[name].make_inputs(6))
    for chosen in (["a"], ["b", "c"]):
        model.embed(rows, task=chosen)
    own = {t.data_ptr() for t in (*model.core.base.parameters(), *model.core.base.buffers())}
    second = model.sets.second_pass.model
    assert {t.data_ptr() for t in (*second.parameters(), *second.buffers())} == own


@pytest.mark.parametrize("name", FAMILIES)
def test_copies_for_a_set_own_no_matrix_of_a_layer(root, name):
    model = massmerge.load(family_bundle(root, name))
    model.embed(rows_of(FAMILIES[name].make_inputs(2)), task="b")
    own = {t.data_ptr() for t in (*model.core.base.parameters(), *model.core.base.buffers())}
    copies = model.sets.changes((1,)).modules.values()
    fresh = sum(t.nbytes for copy in copies for t in copy.parameters() if t.data_ptr() not in own)
    base_bytes = sum(t.nbytes for t in model.core.base.parameters())
    assert fresh < 0.15 * base_bytes


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixed_batch_runs_as_one_and_equals_each_input_by_itself(root, tmp_path, name):
    options = {"site": "M0", "token": "mean"}  # voters whose choice differs from row to row with these random weights
    model = massmerge.load(with_options(family_bundle(root, name), tmp_path / "bundle", router=options))
    rows = rows_of(FAMILIES[name].make_inputs(9))
    sets = [routing.selected for routing in model.route(rows)]
    together = model.embed(rows)
    assert len({tuple(s) for s in sets}) > 1
    for row, found in zip(rows, together, strict=True):
        assert relative_error(model.embed([row])[0], found) < 1e-4


def test_a_mixed_batch_calls_each_layer_of_the_base_once(root):
    model = massmerge.load(family_bundle(root, "bert"))
    layer = model.sets.second_pass.model.get_submodule("encoder.layer.1.output.dense")
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    model.predict(rows_of(FAMILIES["bert"].make_inputs(9)))
    assert len(calls) == 1


# Weighted and plain merges of a backbone


@pytest.mark.parametrize("name", ["bert", "vit", "gpt2"])
@pytest.mark.parametrize("variant", ["plain", "weighted"])
def test_a_variant_of_the_merge_equals_the_dense_model(root, tmp_path, name, variant):
    router, answer = {"top_k": 2, "threshold": 0.0}, {"merge": variant}
    bundle = with_options(family_bundle(root, name), tmp_path / "bundle", router=router, answer=answer)
    inputs = FAMILIES[name].make_inputs(3)
    model = massmerge.load(bundle)
    for i, prediction in enumerate(model.predict(rows_of(inputs), top=99)):
        tasks = sorted(prediction.routing.selected)
        weights = [prediction.routing.weights[task] for task in tasks]

        def merge(found, weights=weights):
            if variant == "weighted":
                return weighted_tsv_merge(found, weights).float()
            return sum(u @ torch.diag(s) @ v for u, s, v in found)

        for head in tasks:
            dense = dense_expert(family_bundle(root, name), name, tasks, head, merge)
            with torch.inference_mode():
                expected = dense(**{k: v[i : i + 1] for k, v in inputs.items()}).logits[0]
            found = torch.tensor([logits_of(prediction)[head, f"LABEL_{j}"] for j in range(len(expected))])
            assert relative_error(found, expected) < 1e-4


# The cache


def answers(model, rows):
    return [(p.task, p.label, p.score) for p in model.predict(rows)]


def assert_same_answers(found, expected):
    assert [a[:2] for a in found] == [a[:2] for a in expected]
    assert all(abs(a[2] - b[2]) < 1e-5 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_a_cache_gives_the_same_answers(root, name):
    bundle, rows = family_bundle(root, name), rows_of(FAMILIES[name].make_inputs(9))
    expected = answers(massmerge.load(bundle), rows)
    model = massmerge.load(bundle, cache="64MB")
    for _ in range(5):
        assert_same_answers(answers(model, rows), expected)
    assert model.sets.cache.held_bytes > 0


def test_a_cache_never_holds_more_than_its_bound_and_lets_the_oldest_go(root):
    bundle, rows = family_bundle(root, "bert"), rows_of(FAMILIES["bert"].make_inputs(2))
    large = massmerge.load(bundle, cache="1GB")
    for _ in range(3):
        large.predict(rows, task="a")
    one = large.sets.cache.held_bytes
    model = massmerge.load(bundle, cache=2 * one)
    cache = model.sets.cache
    for task in ("a", "b", "c"):
        for _ in range(3):
            model.predict(rows, task=task)
            assert cache.held_bytes <= 2 * one
    held = [bool(model.sets.changes((i,)).materialised) for i in range(3)]
    assert held == [False, True, True]


def test_a_set_that_is_used_rarely_is_not_held(root):
    model = massmerge.load(family_bundle(root, "bert"), cache="1GB")
    model.predict(rows_of(FAMILIES["bert"].make_inputs(2)), task="a")
    assert model.sets.cache.held_bytes == 0


def test_a_set_that_does_not_fit_is_not_held(root):
    bundle, rows = family_bundle(root, "bert"), rows_of(FAMILIES["bert"].make_inputs(2))
    model = massmerge.load(bundle, cache="1KB")
    for _ in range(5):
        model.predict(rows, task="a")
    assert model.sets.cache.held_bytes == 0


def test_a_set_that_was_forgotten_and_made_anew_is_held_anew(root, monkeypatch):
    monkeypatch.setattr("massmerge.model.second_pass.sets._KNOWN_SETS", 1)
    bundle, rows = family_bundle(root, "bert"), rows_of(FAMILIES["bert"].make_inputs(2))
    model = massmerge.load(bundle, cache="1GB")
    for task in ("a", "a", "a", "b", "a"):
        model.predict(rows, task=task)
    assert model.sets.changes((0,)).materialised


def test_no_cache_is_the_default(root):
    model = massmerge.load(family_bundle(root, "bert"))
    rows = rows_of(FAMILIES["bert"].make_inputs(2))
    for _ in range(5):
        model.predict(rows, task="a")
    assert model.sets.cache.held_bytes == 0


@pytest.mark.parametrize(
    ("size", "bytes_"), [(7, 7), ("512MB", 512 * 10**6), ("1.5 kb", 1500), ("2GiB", 2**31), ("10B", 10), ("0", 0)]
)
def test_sizes_are_read_as_people_write_them(size, bytes_):
    assert parse_bytes(size) == bytes_


@pytest.mark.parametrize("size", ["much", "-1", "3 TB", "", "MB"])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(InputError, match="is no size; write bytes, or 512MB, or 2GiB"):
        parse_bytes(size)
