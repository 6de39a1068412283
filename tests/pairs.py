"""A base and one expert of it, written side by side."""

import torch

from models import FAMILIES

BERT = FAMILIES["bert"]


def shifted(model, seed=0, scale=0.02):
    """The model with every parameter moved a little, as fine-tuning does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale)
    return model


def write_pair(folder, base, expert):
    """A base and an expert of it as two folders."""
    base.save_pretrained(folder / "base")
    expert.save_pretrained(folder / "expert")


def write_bert(folder, labels=3):
    """A BERT base and one expert of it; returns both."""
    base = BERT.make_base()
    expert = BERT.make_expert(base, 0, labels)
    write_pair(folder, base, expert)
    return base, expert
