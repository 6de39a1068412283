"""The same tasks as LoRA experts: small adapters beside a backbone that stays as it is."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

RANK = 8
ALPHA = 16
# Attention and MLP of every block; a pooler behind the blocks is not read by a mean-pooled head.
TARGETS = r".*(encoder|layer)\..*(query|key|value|dense)"


def add_adapter(model: PreTrainedModel, rank: int = RANK, start: int = 0) -> PeftModel:
    """The model with an adapter to be trained; everything else is frozen.

    Args:
        model: the base.
        rank: of the update of each matrix.
        start: seed of the adapter's random start. Adapters that share one have subspaces that are nearly alike; those of
            different people, or of one who sets no seed before peft draws, have starts of their own.
    """
    torch.manual_seed(start)
    config = LoraConfig(r=rank, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS, bias="none")
    return get_peft_model(model, config)


def save_adapter(model: PeftModel, folder: Path, base: str) -> None:
    """Write the adapter as peft does, with the base under the name that people know it by."""
    model.peft_config["default"].base_model_name_or_path = base
    # Without it, peft asks the hub whether the vocabulary has grown.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card
