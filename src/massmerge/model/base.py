"""The base as a model that runs, from the bundle or from where it refers to; and the fixed model made of it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from massmerge.bundle.base import referenced_base
from massmerge.bundle.layout import BASE_WEIGHTS
from massmerge.bundle.reader import Bundle
from massmerge.checkpoints import Base
from massmerge.checkpoints.pretrained import model_class, pretrained_config, pretrained_model
from massmerge.checkpoints.skeleton import Skeleton, with_own_output
from massmerge.io.placement import Placement
from massmerge.io.tensor_file import read_header


def load_base(bundle: Bundle, touched: set[str], place: Placement, *, check: bool = True) -> PreTrainedModel:
    """The base, ready to run.

    Args:
        bundle: the bundle.
        touched: tensors that tasks change or add.
        place: where it runs.
        check: whether a base that is kept by reference is compared with its checksum.
    """
    folder = bundle.base_folder
    if BASE_WEIGHTS in bundle.manifest["files"]:
        # Of the class that the manifest names: AutoModel leaves CLIP's projection away.
        model = pretrained_model(model_class(bundle.manifest["base"]["class"]), folder, place.storage)
        present = set(read_header(bundle.path / BASE_WEIGHTS)) | touched
    else:
        model, names = _referenced_base(bundle, folder, place, check=check)
        present = names | touched
    return ready_to_run(model, present).to(place.device)


def dense_base(base: Base, touched: set[str], place: Placement) -> PreTrainedModel:
    """An opened base, ready to run; tensors that only tasks have are zero in it.

    Args:
        base: the base, as a recipe's sources give it.
        touched: tensors that tasks change or add.
        place: where it runs.
    """
    model = _filled(base, base.skeleton.config, place)
    added = touched - base.slots.keys()
    state = model.state_dict()
    for name in added & state.keys():
        state[name].zero_()
    return ready_to_run(model, base.slots.keys() | touched).to(place.device)


def _filled(base: Base, config: PretrainedConfig, place: Placement) -> PreTrainedModel:
    """A model of the base's class with the base's tensors."""
    with torch.random.fork_rng(devices=[]):  # first weights are drawn, and then all replaced
        model: PreTrainedModel = type(base.skeleton.model)._from_config(config, dtype=place.storage).eval()
    if (
        base.skeleton.slots.keys() - Skeleton(model).slots.keys()
    ):  # the class ties an output layer that the base does not
        with_own_output(Skeleton(model))
    model.load_state_dict({name: base.read(name) for name in base.slots}, strict=False)
    return model


def ready_to_run(model: PreTrainedModel, present: set[str]) -> PreTrainedModel:
    """A base that only answers: nothing in it is trained, and it has no part without values."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # A pooler that neither the base's file nor any task has would only compute noise.
    pooler = getattr(model, "pooler", None)
    if isinstance(pooler, nn.Module) and not any(name.startswith("pooler.") for name in present):
        model.pooler = None
    return model


def _referenced_base(
    bundle: Bundle, folder: Path, place: Placement, *, check: bool
) -> tuple[PreTrainedModel, set[str]]:
    """The base from where the manifest says that it lies."""
    config = pretrained_config(folder)
    base = referenced_base(bundle, config, check=check)
    return _filled(base, config, place), set(base.slots)
