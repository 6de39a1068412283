"""Bundles in 16 bits: weights and activations are, decisions are not."""

import os
import subprocess
import sys

import pytest
import torch

import massmerge
from massmerge.io import placement
from models import FAMILIES, family_bundle, rows_of, text_bundle, write_recipe

_PROBE = "import torch; x = torch.ones(64, 64).bfloat16(); assert float((x @ x)[0, 0]) == 64"
_CAPPED = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


@pytest.fixture(scope="module", autouse=True)
def _multiplies():
    """Skip where a product in bfloat16 fails or kills the process, as it does on some machines."""
    if subprocess.run([sys.executable, "-c", _PROBE], env=_CAPPED, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not multiply in bfloat16")


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2"])
def test_answers_in_bfloat16_are_close_to_those_in_float32(root, name):
    bundle, inputs = family_bundle(root, name), FAMILIES[name].make_inputs(6)
    exact, half = massmerge.load(bundle), massmerge.load(bundle, dtype="bfloat16")
    assert half.core.placement.compute == torch.bfloat16
    weights = [[r.weights[task] for task in "abc"] for r in exact.route(inputs)]
    found = [[r.weights[task] for task in "abc"] for r in half.route(inputs)]
    assert torch.allclose(torch.tensor(found), torch.tensor(weights), atol=0.2)
    for task in "abc":
        pairs = zip(exact.predict(inputs, task=task), half.predict(inputs, task=task), strict=True)
        assert all(abs(a.score - b.score) < 0.02 for a, b in pairs)


def test_what_decides_is_in_float32_whatever_the_type(root):
    model = massmerge.load(family_bundle(root, "vit"), dtype="bfloat16")
    inputs = FAMILIES["vit"].make_inputs(2)
    assert all(seen.dtype == torch.float32 for seen in model.activations(inputs))
    router = model.stages.first.router.routers[0]
    assert router.stacked.dtype == torch.float32
    gram = router.bases[0] @ router.bases[0].mT
    assert torch.allclose(gram, torch.eye(len(gram)), atol=1e-5)  # not rounded to 16 bits in between
    assert model.sets.tensors.factors(0, next(iter(model.stages.sites)).tensors[0]).s.dtype == torch.float32


def test_a_base_in_bfloat16_takes_half_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "_has_bfloat16", lambda: True)
    family = FAMILIES["bert"]
    base = family.make_base()
    base.bfloat16().save_pretrained(tmp_path / "base")
    for seed, task in enumerate("ab"):
        family.make_expert(family.make_base(), seed).bfloat16().save_pretrained(tmp_path / task)
    bundle = massmerge.merge(write_recipe(tmp_path, list("ab"), rank=8), tmp_path / "bundle")
    held = {dtype: massmerge.load(bundle, dtype=dtype).core.base for dtype in ("auto", "float32")}
    sizes = {dtype: sum(p.nbytes for p in model.parameters()) for dtype, model in held.items()}
    assert 2 * sizes["auto"] == sizes["float32"]
    answers = [massmerge.load(bundle, dtype=dtype).predict(family.make_inputs(4)) for dtype in held]
    assert all(abs(a.score - b.score) < 0.05 for a, b in zip(*answers, strict=True) if a.task == b.task)


def test_the_command_takes_a_type(root, capsys):
    from click.testing import CliRunner

    from massmerge.cli.main import main

    bundle = str(text_bundle(root))
    done = CliRunner().invoke(
        main, ["predict", bundle, "a dull film", "--dtype", "bfloat16", "--device", "cpu", "--json"]
    )
    assert done.exit_code == 0 and '"task"' in done.output
    refused = CliRunner().invoke(main, ["predict", bundle, "a dull film", "--device", "cuda:7"])
    assert refused.exit_code == 2 and "cannot run on 'cuda:7'" in refused.output


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_texts_are_written_in_16_bits(root, dtype):
    """Of T5 transformers keeps one layer in float32 where all others are float16."""
    bundle, prompts = family_bundle(root, "t5"), rows_of(FAMILIES["t5"].make_inputs(3))
    found, exact = (massmerge.load(bundle, dtype=one).generate(prompts, max_new_tokens=4) for one in (dtype, "float32"))
    assert [len(one.tokens) for one in found] == [len(one.tokens) for one in exact]
    assert [one.tokens[:1] for one in found] == [one.tokens[:1] for one in exact]
