"""Bundles whose tasks are changed, the experts to do it with, and the command."""

from pathlib import Path

import peft
import torch
import transformers as tf
import yaml
from click.testing import CliRunner

import massmerge
from massmerge.cli.main import main
from models import FAMILIES, write_family, write_recipe

TASKS = {"a": 2, "b": 3, "c": 4}


def bundles(folder: Path, family: str = "bert", **sections) -> tuple[Path, Path]:
    """A bundle of the tasks a, b and c, and one of a and b alone; the recipes' folder is theirs."""
    write_family(folder, family, TASKS)
    for name, tasks in (("all", "abc"), ("two", "ab")):
        recipe = write_recipe(folder, list(tasks), name=f"{name}.yaml")
        recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), **sections}, sort_keys=False))
        massmerge.merge(recipe, folder / name)
    return folder / "all", folder / "two"


def write_adapter(folder: Path, task: str, kind: type, seed: int = 0, **options) -> None:
    """A LoRA adapter over the base in a folder, with updates of its own."""
    model = kind.from_pretrained(folder / "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    wrapped.save_pretrained(folder / task)


def write_decoder(folder: Path) -> tf.LlamaForCausalLM:
    """A decoder whose output layer is its own, as the base of a folder."""
    torch.manual_seed(3)
    base = tf.LlamaForCausalLM(FAMILIES["llama"].make_config()).eval()
    base.save_pretrained(folder / "base")
    return base


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])
