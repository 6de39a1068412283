"""An example whose tasks answer in every way: any number of labels, a number, one label."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import massmerge
from massmerge.cli.demo.example import make_example
from massmerge.model.answers import Prediction, make_prediction
from massmerge.recipe import AnswerOptions

TEXTS = [
    "win a free prize now",
    "the team won the match",
    "a sad film",
    "vote on the law",
    "good good good",
    "cell gene",
]


def change_tensors(folder: Path, change) -> None:
    """Change the weights of an expert."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


def change_config(folder: Path, **values) -> None:
    """Change the configuration of an expert."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def write_example(folder: Path) -> Path:
    """The example with `topic` as a multi-label task and `spam` as one that gives a number; returns the recipe."""
    recipe = make_example(folder)
    change_config(folder / "topic", problem_type="multi_label_classification")
    # So that of several labels some pass: logits of both signs that differ from text to text.
    change_tensors(folder / "topic", lambda state: state["classifier.weight"].mul_(20))
    change_config(folder / "spam", id2label={"0": "stars"}, label2id={"stars": 0})
    change_tensors(folder / "spam", one_output)
    return recipe


def one_output(state: dict[str, torch.Tensor]) -> None:
    """A head with one output."""
    state["classifier.weight"], state["classifier.bias"] = state["classifier.weight"][:1], state["classifier.bias"][:1]


@cache
def made(root: Path) -> Path:
    """The folder of that example, with its bundle in `bundle`."""
    massmerge.merge(write_example(root / "problem types"), root / "problem types" / "bundle")
    return root / "problem types"


def overflowing(state: dict[str, torch.Tensor]) -> None:
    """Weights that are numbers, whose products are not."""
    for part in ("intermediate", "output"):
        state[f"bert.encoder.layer.3.{part}.dense.weight"].mul_(1e18)


def answer(logits: list[float], problem: str = "multi_label_classification", **options: object) -> Prediction:
    """The answer of one task with these logits."""
    names = tuple("abcdefgh"[: len(logits)])
    return make_prediction(
        {"t": torch.tensor(logits)}, {"t": names}, {"t": problem}, {"t": 1.0}, AnswerOptions(**options), top=2
    )
