"""The base as a model that runs, from the bundle or from where it refers to; and the fixed model made of it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from massmerge.bundle.base import referenced_base
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
    if bundle.base_weights:
        # Of the class that the manifest names: AutoModel leaves CLIP's projection away.
        model = pretrained_model(model_class(bundle.manifest["base"]["class"]), folder, place.storage)
        present = touched.union(*map(read_header, bundle.base_weights))
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
    model = _filled(base, base.skeleton.config, place, own=True)
    added = touched - base.slots.keys()
    state = model.state_dict()
    for name in added & state.keys():
        state[name].zero_()
    return ready_to_run(model, base.slots.keys() | touched).to(place.device)


def _filled(base: Base, config: PretrainedConfig, place: Placement, *, own: bool = False) -> PreTrainedModel:
    """A model of the base's class with the base's tensors, which stay in their files where they can; others are zero.

    Args:
        base: the base.
        config: its configuration.
        place: where it runs.
        own: whether its tensors are its own, so that they may be changed in place, as some methods do.
    """
    with no_init_weights():  # what is never written to takes no memory
        model: PreTrainedModel = type(base.skeleton.model)._from_config(config, dtype=place.storage).eval()
    model.tie_weights()
    if (
        base.skeleton.slots.keys() - Skeleton(model).slots.keys()
    ):  # the class ties an output layer that the base does not
        model = with_own_output(Skeleton(model)).model
    given: dict[str, Tensor] = {}
    for slot in Skeleton(model).slots.values():
        if slot.name in base.slots:
            value = base.mapped(slot.name)
            value = value.to(place.storage if value.is_floating_point() else value.dtype, copy=own)
            whole = nn.Parameter(value, requires_grad=False) if value.is_floating_point() else value
            given |= dict.fromkeys((slot.name, *slot.aliases), whole)  # one tensor under all its names
        elif slot.name in dict(model.named_parameters()):
            model.get_parameter(slot.name).data.zero_()
    model.load_state_dict(given, strict=False, assign=True)
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
