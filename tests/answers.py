"""Inputs of loaded bundles, and their answers compared."""

import torch

from models import FAMILIES, backbone_of, rows_of


def bert_rows(count=6, seed=0):
    """Ready inputs of the tiny BERT."""
    return rows_of(FAMILIES["bert"].make_inputs(count, seed))


def vit_images(model, count=12):
    """Random images of the size that a loaded bundle takes."""
    size = model.core.base.config.image_size
    images = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    return list(images[:, :, :size, :size])


def bert_delta(bundle, task, tensor):
    """What an expert of the tiny BERT changes in a tensor."""
    expert = backbone_of(FAMILIES["bert"].expert.from_pretrained(bundle.parent / task), FAMILIES["bert"].base)
    base = FAMILIES["bert"].base.from_pretrained(bundle.parent / "base")
    return (expert.state_dict()[tensor] - base.state_dict()[tensor]).double()


def assert_same_answers(found, expected):
    """The same tasks, labels and sets, by scores and weights that differ by rounding only."""
    assert [(p.task, p.label, p.routing.selected) for p in found] == [
        (p.task, p.label, p.routing.selected) for p in expected
    ]
    assert all(abs(a.score - b.score) < 1e-4 for a, b in zip(found, expected, strict=True))
    for a, b in zip(found, expected, strict=True):
        assert all(abs(a.routing.weights[task] - w) < 1e-3 for task, w in b.routing.weights.items())
