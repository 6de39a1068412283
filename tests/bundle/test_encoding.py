"""Factors stored in 16 and 8 bits: what they decode to, and that everything that reads a bundle reads these."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import massmerge
from changes import bundles
from massmerge import Bundle, InputError
from massmerge.bundle.encoding import decode, encode, rounding, stored_type
from massmerge.bundle.manifest import read_manifest, write_manifest
from massmerge.io.tensor_file import read_tensors, write_tensors
from massmerge.linalg.factors import Factors, truncated_svd
from models import FAMILIES, contents, dense_expert, make_bundle, rows_of

ENCODINGS = ("base", "float16", "int8")
MATRIX = "encoder.layer.1.output.dense.weight"


@st.composite
def factors(draw) -> Factors:
    """Of matrices that are Gaussian, or have a few entries that are far larger than the others."""
    m, n, seed = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(0, 10**6))
    a = torch.randn(m, n, generator=torch.Generator().manual_seed(seed)) * draw(st.sampled_from([1e-6, 1.0, 1e4]))
    return truncated_svd(a ** draw(st.sampled_from([1, 5])), draw(st.integers(1, min(m, n))))


@given(factors())
def test_in_int8_no_entry_moves_by_more_than_half_a_step_of_its_vector(f):
    found = decode(encode(f, torch.int8))
    for given_row, row in zip([*f.u.mT, *f.v], [*found.u.mT, *found.v], strict=True):
        step = float(given_row.abs().max()) / 127
        assert float((given_row - row).abs().max()) <= 0.51 * step  # a scale of 8 bits is off by 1/512
    assert torch.equal(found.s, f.s)


@given(factors(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8]))
def test_what_is_decoded_and_encoded_again_keeps_its_bytes(f, dtype):
    once = encode(f, dtype)
    decoded = decode(once)
    again = encode(Factors(decoded.u.float(), decoded.s, decoded.v.float()), dtype)
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)


@given(factors())
def test_rounding_bounds_what_int8_changes_in_the_product(f):
    parts = encode(f, torch.int8)
    moved = (decode(parts).dense().double() - f.dense().double()).norm() / f.dense().double().norm()
    assert moved <= 1.05 * rounding(parts) + 1e-6


def test_a_vector_of_zeros_stays_zero():
    found = decode(encode(Factors(torch.zeros(3, 1), torch.ones(1), torch.zeros(1, 2)), torch.int8))
    assert not found.u.any() and not found.v.any()


def test_a_base_of_16_bits_is_not_stored_in_another_16():
    assert stored_type("float16", torch.bfloat16, (64, 64)) == torch.bfloat16
    assert stored_type("float16", torch.float32, (64, 64)) == torch.float16
    assert stored_type("base", torch.bfloat16, (64, 64)) == torch.bfloat16


def test_a_small_matrix_is_kept_in_the_type_of_the_base():
    assert stored_type("int8", torch.float32, (2, 384)) == torch.float32


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A bundle of each encoding, of the same experts and ranks."""
    return {
        encoding: make_bundle(tmp_path_factory.mktemp(encoding), "bert", {"a": 2, "b": 3, "c": 4},
                              merge={"rank": 8, "factors": encoding})
        for encoding in ENCODINGS
    }  # fmt: skip


def product(triplets):
    """The delta of the one task of a set."""
    ((u, s, v),) = triplets
    return (u * s) @ v


@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_answers_are_those_of_a_dense_computation_with_decoded_factors(made, encoding):
    bundle, inputs = made[encoding], FAMILIES["bert"].make_inputs(4)
    model = massmerge.load(bundle)
    for task in "abc":
        wanted = dense_expert(bundle, "bert", [task], task, product)(**inputs).logits.max(1).values
        found = [p.logit for p in model.predict(rows_of(inputs), task=task)]
        torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_verify_inspect_export_and_routing_read_every_encoding(made, encoding, tmp_path):
    bundle = made[encoding]
    assert massmerge.verify(bundle, experts=True, folder=bundle.parent).ok
    assert massmerge.inspect(bundle).factors == encoding
    assert Bundle(bundle).base_dtype == "float32"
    massmerge.export(bundle, tmp_path / "out", "peft")
    exported = load_file(next((tmp_path / "out").rglob("*.safetensors")))
    assert {tensor.dtype for tensor in exported.values()} == {torch.float32}
    routings = massmerge.load(bundle).route(rows_of(FAMILIES["bert"].make_inputs(2)))
    assert all(set(r.residuals) == {"a", "b", "c"} for r in routings)


def test_only_factors_of_another_type_raise_the_format(made):
    found = {encoding: read_manifest(bundle)["format_version"] for encoding, bundle in made.items()}
    assert found == {"base": 1, "float16": 2, "int8": 2}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_plan_tells_what_the_factors_weigh(made, encoding):
    written = sum(path.stat().st_size for path in made[encoding].rglob("factors.safetensors"))
    sizes = massmerge.make_plan(made[encoding].parent / "recipe.yaml").sizes
    assert 0.85 * (sizes.factors + sizes.whole) < written <= sizes.factors + sizes.whole


def test_a_budget_buys_more_rank_with_smaller_factors(tmp_path):
    ranks = {}
    for encoding in ENCODINGS:
        bundle = make_bundle(tmp_path / encoding, "bert", {"a": 2, "b": 3}, merge={"budget": 2.0, "factors": encoding})
        ranks[encoding] = max(Bundle(bundle).ranks[MATRIX])
        about = massmerge.inspect(bundle)
        assert about.ratio <= 2.0
    assert ranks["base"] < ranks["float16"] < ranks["int8"]


@pytest.mark.parametrize("encoding", ("float16", "int8"))
def test_tasks_that_stay_keep_their_bytes_when_another_goes(tmp_path, encoding):
    whole, _ = bundles(tmp_path, merge={"rank": 8, "factors": encoding})
    before = contents(whole / "tasks")
    massmerge.remove(whole, "c")
    after = contents(whole / "tasks")
    assert after.keys() < before.keys()
    assert all(before[name] == data for name, data in after.items())
    assert read_manifest(whole)["format_version"] == 2


@pytest.mark.parametrize("encoding", ("float16", "int8"))
def test_a_task_is_added_in_the_encoding_of_the_bundle(tmp_path, encoding):
    whole, part = bundles(tmp_path, merge={"rank": 8, "factors": encoding})
    massmerge.add(part, {"c": "c"}, folder=tmp_path)
    for task in "abc":  # what is kept whole was put together from factors, and differs by their rounding
        found, wanted = (dict(read_tensors(b / "tasks" / task / "factors.safetensors")) for b in (part, whole))
        parts = [name for name in wanted if name.endswith((".u", ".s", ".v", ".scale"))]
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in parts)
    assert massmerge.verify(part, experts=True, folder=tmp_path).ok


def test_a_fixed_model_of_int8_factors_is_that_of_the_decoded_ones(tmp_path):
    bundle = make_bundle(tmp_path, "bert", {"a": 2, "b": 3}, merge={"rank": 8, "factors": "int8"},
                         router={"first_pass": "fixed", "site": "M1"})  # fmt: skip
    assert len(massmerge.load(bundle).route(rows_of(FAMILIES["bert"].make_inputs(2)))) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t.pop(f"{MATRIX}.scale"),
        lambda t: t.update({f"{MATRIX}.scale": t[f"{MATRIX}.scale"][:, 1:].contiguous()}),
        lambda t: t.update({f"{MATRIX}.v": t[f"{MATRIX}.v"].float()}),
    ],
    ids=["without scales", "too few scales", "one factor of another type"],
)
def test_factors_that_cannot_be_decoded_are_refused(made, tmp_path, spoil):
    bundle = shutil.copytree(made["int8"], tmp_path / "bundle")
    path = bundle / "tasks" / "a" / "factors.safetensors"
    tensors = dict(read_tensors(path))
    spoil(tensors)
    write_tensors(path, tensors)
    manifest = read_manifest(made["int8"])
    write_manifest(bundle, {k: v for k, v in manifest.items() if k not in ("files", "sha256")})
    with pytest.raises(InputError, match=rf"do not fit the base:[\s\S]*a: {MATRIX}"):
        massmerge.load(bundle)
