"""A service and generation on the simulated GPU: threads of their own, and the same answers."""

import pytest
import torch

import massmerge
from models import FAMILIES, rows_of, text_bundle
from serving import holding
from simulated_device import simulated_gpu
from writers import writer_bundle

_TEXTS = ["win a free phone now", "a moving, quiet film"]


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_a_mixed_batch_of_prompts_is_written_the_same(root, kind):
    bundle, prompts = writer_bundle(root, kind), rows_of(FAMILIES[kind].make_inputs(4))
    with simulated_gpu(), torch.no_grad():
        found, expected = (
            massmerge.load(bundle, device=device).generate(prompts, max_new_tokens=4) for device in ("cuda:0", "cpu")
        )
    assert len({one.task for one in expected}) > 1
    assert [(one.task, one.tokens) for one in found] == [(one.task, one.tokens) for one in expected]


def test_a_service_answers_from_the_gpu(root, monkeypatch):
    bundle = text_bundle(root)
    expected = massmerge.load(bundle, device="cpu").predict(_TEXTS)
    with simulated_gpu(), torch.no_grad(), holding(monkeypatch, bundle=bundle, device="cuda:0") as held:
        given = held.predict(_TEXTS).json()["predictions"]
    assert [(one["task"], one["label"]) for one in given] == [(one.task, one.label) for one in expected]
