"""Packed weights: the same products, made once a layer is used again and again."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import massmerge
from answers import assert_same_answers, vit_images
from massmerge.model.speed import packed
from massmerge.model.speed.packed import PackedLinear, PackedPatches, pack_layers, patch_layer
from massmerge.model.trees import shared_copy
from models import make_bundle

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN packs nothing")


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    monkeypatch.setattr(packed, "_LEAST_VALUES", 0)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(packed, "_USES", 0)


def layer_of(inputs=16, outputs=24, *, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    pack_layers(layer)
    return layer


@torch.inference_mode()
def use(layer, times=1, rows=8):
    return [layer(torch.ones(rows, layer.in_features)) for _ in range(times)][-1]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
    deep=st.booleans(),
)
def test_a_packed_layer_gives_what_a_plain_one_gives(rows, inputs, outputs, bias, deep):
    layer = layer_of(inputs, outputs, bias=bias)
    plain = nn.functional.linear
    x = torch.randn(*((3, rows) if deep else (rows,)), inputs, generator=torch.Generator().manual_seed(rows))
    use(layer, packed._USES + 1)
    with torch.inference_mode():
        assert isinstance(layer, PackedLinear) and layer.pack._packed is not None
        assert torch.allclose(layer(x), plain(x, layer.weight, layer.bias), atol=1e-5)
        assert torch.allclose(layer.product(x), plain(x, layer.weight), atol=1e-5)


def test_a_weight_is_packed_when_it_has_been_used_a_few_times():
    layer = layer_of()
    use(layer, packed._USES)
    assert layer.pack._packed is None
    use(layer)
    assert layer.pack._packed is not None


def test_few_rows_and_passes_with_gradients_take_the_plain_weight(at_once):
    layer = layer_of()
    use(layer, rows=packed._LEAST_ROWS - 1)
    layer(torch.ones(8, 16))
    assert layer.pack._packed is None
    x = torch.ones(8, 16, requires_grad=True)
    use(layer)
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(8, 16), atol=1e-5)


def test_trees_over_the_same_tensors_share_what_is_packed(at_once):
    model = nn.Sequential(layer_of())
    other = shared_copy(model)
    use(model[0])
    assert other[0].pack._packed is model[0].pack._packed is not None


def test_a_layer_that_was_given_another_weight_does_not_take_the_old_one(at_once):
    model = nn.Sequential(layer_of())
    use(model[0])
    other = shared_copy(model)
    other[0].weight = nn.Parameter(torch.full((24, 16), 0.5), requires_grad=False)
    expected = 8.0 + other[0].bias.expand(8, 24)
    assert torch.allclose(use(other[0]), expected)
    pack_layers(other)
    assert torch.allclose(use(other[0], 2), expected)
    assert other[0].pack._packed is not None
    assert other[0].pack is not model[0].pack


def test_small_weights_and_other_types_stay_plain(monkeypatch):
    monkeypatch.setattr(packed, "_LEAST_VALUES", 1000)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(40, 40).double(), nn.Linear(40, 40), nn.LayerNorm(40))
    pack_layers(model)
    assert [type(m).__name__ for m in model] == ["Linear", "Linear", "PackedLinear", "LayerNorm"]


def test_without_onednn_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert type(layer_of()) is nn.Linear


def test_plain_values_can_still_be_read_after_packing(at_once, tmp_path):
    torch.arange(4096.0).numpy().tofile(tmp_path / "weight")
    layer = nn.Linear(64, 64, bias=False)
    mapped = torch.from_file(str(tmp_path / "weight"), size=4096).view(64, 64)  # let go by the system, read again
    layer.weight = nn.Parameter(mapped, requires_grad=False)
    pack_layers(layer)
    use(layer)
    assert layer.pack._packed is not None
    assert torch.equal(layer.weight, torch.arange(4096.0).view(64, 64))


def test_many_threads_pack_a_weight_once_and_all_get_the_same(at_once, monkeypatch):
    layer, found, made = layer_of(), [], []
    real = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda *a: made.append(1) or real(*a))
    threads = [threading.Thread(target=lambda: found.append(use(layer, 5))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert all(torch.allclose(one, found[0], atol=1e-6) for one in found)


@pytest.mark.parametrize("first_pass", ["base", "fixed"])
def test_a_bundle_answers_the_same_before_and_after_its_weights_are_packed(tmp_path, first_pass):
    router = {"first_pass": first_pass, "site": "M1", "token": "mean"}
    model = massmerge.load(make_bundle(tmp_path, "vit", {"a": 2, "b": 3}, merge={"rank": 8}, router=router))
    images = vit_images(model, 12)
    before = model.predict(images)
    assert packs(model) == {False}
    for _ in range(packed._USES):
        model.predict(images)
    assert packs(model) == {True}
    assert_same_answers(model.predict(images), before)


def packs(model):
    """Whether the layers that both passes run are packed."""
    layers = [m for m in model.sets.second_pass.model.modules() if isinstance(m, PackedLinear)]
    layers += [
        m
        for path, m in model.stages.first.first_pass._part.named_modules()
        if ".0." in path and isinstance(m, PackedLinear)
    ]
    assert layers
    return {layer.pack._packed is not None for layer in layers}


def test_packed_answers_are_those_of_the_plain_base(load_vit, at_once, monkeypatch):
    images = vit_images(load_vit(), 12)
    fast = load_vit().predict(images)
    monkeypatch.setattr(packed, "_LEAST_VALUES", 1 << 60)
    slow = load_vit().predict(images)
    assert_same_answers(fast, slow)


def conv_of(channels=3, size=4, bias=True):
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, 24, size, stride=size, bias=bias).requires_grad_(False)
    pack_layers(layer)
    return layer


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 3), high=st.integers(4, 13), wide=st.integers(4, 13), bias=st.booleans())
def test_packed_patches_are_the_convolution(count, high, wide, bias):
    layer, x = conv_of(bias=bias), torch.randn(count, 3, high, wide, generator=torch.Generator().manual_seed(high))
    naive = nn.functional.conv2d(x, layer.weight, layer.bias, stride=4)
    assert isinstance(layer, PackedPatches)
    for _ in range(packed._USES + 2):
        with torch.inference_mode():
            assert torch.allclose(layer(x), naive, atol=1e-5)
    assert torch.allclose(layer(x), naive, atol=1e-5)  # outside, by the plain convolution


def test_trees_share_packed_patches_and_another_weight_has_its_own(at_once):
    layer, x = conv_of(), torch.ones(2, 3, 8, 8)
    copy = shared_copy(nn.Sequential(layer))[0]
    assert patch_layer(copy) is patch_layer(layer)
    copy.weight = nn.Parameter(2 * layer.weight, requires_grad=False)
    naive = nn.functional.conv2d(x, copy.weight, copy.bias, stride=4)
    with torch.inference_mode():
        assert torch.allclose(copy(x), naive, atol=1e-5)  # what was packed is of another weight
        pack_layers(copy)
        assert patch_layer(copy) is not patch_layer(layer)
        assert torch.allclose(copy(x), naive, atol=1e-5)


@pytest.mark.parametrize("options", [{"stride": 2}, {"padding": 1}, {"dilation": 2}, {"groups": 3}])
def test_a_convolution_that_cuts_no_patches_stays_one(options):
    layer = nn.Conv2d(3, 24, 4, **{"stride": 4, **options})
    pack_layers(layer)
    assert type(layer) is nn.Conv2d
