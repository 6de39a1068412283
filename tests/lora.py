"""LoRA adapters over tiny models, made by the library that users make them with."""

import json

import peft
import torch

from models import FAMILIES


def trained(model, seed=0):
    """The wrapped model with every trainable parameter moved, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def write_adapter(folder, name="bert", kind=None, adapter="expert", changes=None, seed=0, **options):
    """A base in `base` and an adapter over a model of that class; returns the merged model."""
    family = FAMILIES[name]
    base = family.make_base(**(changes or {}))
    base.save_pretrained(folder / "base")
    kind = kind or family.expert
    torch.manual_seed(5 + seed)
    task_model = kind.from_pretrained(folder / "base", **({} if kind is family.base else {"num_labels": 3}))
    wrapped = trained(peft.get_peft_model(task_model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **options})), seed)
    wrapped.save_pretrained(folder / adapter)
    return wrapped.merge_and_unload()


def edit(folder, **changes):
    """Change fields of an adapter's configuration."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
