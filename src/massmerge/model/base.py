"""The base as a model that runs, from the bundle or from where it refers to; and the fixed model made of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from massmerge.bundle.factors import TaskTensors
from massmerge.bundle.manifest import BASE_WEIGHTS
from massmerge.bundle.reader import FIXED, Bundle
from massmerge.checkpoints import Base, find_source, narrow, open_base
from massmerge.checkpoints.pretrained import model_class, pretrained_config, pretrained_model
from massmerge.checkpoints.skeleton import Skeleton, Slot, build, from_matrix, with_own_output
from massmerge.errors import InputError
from massmerge.io.tensor_file import read_header, read_tensor, tensor_bytes
from massmerge.model.route.first_pass import FirstPass
from massmerge.routing.sites import probe_inputs


def load_base(bundle: Bundle, touched: set[str], *, check: bool = True) -> PreTrainedModel:
    """The base in float32, ready to run.

    Args:
        bundle: the bundle.
        touched: tensors that tasks change or add.
        check: whether a base that is kept by reference is compared with its checksum.
    """
    folder = bundle.path / "base"
    if BASE_WEIGHTS in bundle.manifest["files"]:
        # Of the class that the manifest names: AutoModel leaves CLIP's projection away.
        model = pretrained_model(model_class(bundle.manifest["base"]["class"]), folder)
        present = set(read_header(bundle.path / BASE_WEIGHTS)) | touched
    else:
        model, names = _referenced_base(bundle, folder, check=check)
        present = names | touched
    return ready_to_run(model, present)


def dense_base(base: Base, touched: set[str]) -> PreTrainedModel:
    """An opened base in float32, ready to run; tensors that only tasks have are zero in it.

    Args:
        base: the base, as a recipe's sources give it.
        touched: tensors that tasks change or add.
    """
    model = _filled(base, base.skeleton.config)
    added = touched - base.slots.keys()
    state = model.state_dict()
    for name in added & state.keys():
        state[name].zero_()
    return ready_to_run(model, base.slots.keys() | touched)


def _filled(base: Base, config: PretrainedConfig) -> PreTrainedModel:
    """A model of the base's class with the base's tensors."""
    with torch.random.fork_rng(devices=[]):  # first weights are drawn, and then all replaced
        model: PreTrainedModel = type(base.skeleton.model)(config).eval()
    if (
        base.skeleton.slots.keys() - Skeleton(model).slots.keys()
    ):  # the class ties an output layer that the base does not
        with_own_output(Skeleton(model))
    model.load_state_dict({name: base.read(name).float() for name in base.slots}, strict=False)
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


def base_sha256(base: Base) -> str:
    """SHA-256 of all of a base's tensors in the order of their names: what a bundle that refers to it must find again."""
    digest = hashlib.sha256()
    for name in sorted(base.slots):
        digest.update(name.encode())
        digest.update(tensor_bytes(base.read(name)))
    return digest.hexdigest()


def _referenced_base(bundle: Bundle, folder: Path, *, check: bool) -> tuple[PreTrainedModel, set[str]]:
    """The base from where the manifest says that it lies."""
    config = pretrained_config(folder)
    base = referenced_base(bundle, config, check=check)
    return _filled(base, config), set(base.slots)


def referenced_base(bundle: Bundle, config: PretrainedConfig, *, check: bool) -> Base:
    """The base that a bundle refers to, opened where its manifest says.

    Raises:
        InputError: it is not there, or (with `check`) is not the one that was merged.
    """
    said = bundle.manifest["base"]
    try:
        base = narrow(open_base(find_source(said["location"], Path(), download=True)), build(config, said["class"]))
    except InputError as error:
        raise InputError(f"{bundle.path}: its base is kept by reference, and is not to be had: {error}") from None
    if check and base_sha256(base) != said["sha256"]:
        raise InputError(f"{bundle.path}: its base, {said['location']}, has changed since the merge. Merge again.")
    return base


def make_fixed(
    bundle: Bundle, tensors: TaskTensors, tree: PreTrainedModel, first_pass: FirstPass, slots: dict[str, Slot]
) -> None:
    """Give a tree the weights of the bundle's fixed model, as far as the first pass comes."""
    cores, rows = read_header(bundle.path / FIXED), {name: i for i, name in enumerate(bundle.ranks)}
    accepted = bundle.statistics["accepted"].bool()

    def change(name: str) -> Tensor | None:
        """What the fixed model adds to a tensor, if anything."""
        if name not in cores:
            return None
        chosen = [f for t in range(len(tensors.names)) if accepted[rows[name], t] and (f := tensors.factors(t, name))]
        core = read_tensor(cores[name]).to(chosen[0].u.device)
        u, v = torch.cat([f.u for f in chosen], 1).to(core.dtype), torch.cat([f.v for f in chosen]).to(core.dtype)
        return u @ core @ v

    put_fixed(tensors, tree, first_pass, slots, change)


def put_fixed(
    tensors: TaskTensors,
    tree: PreTrainedModel,
    first_pass: FirstPass,
    slots: dict[str, Slot],
    change: Callable[[str], Tensor | None],
) -> None:
    """Give a tree the weights of a fixed model, as far as the first pass comes.

    Args:
        tensors: the tasks'; what has no factors is averaged over all of them.
        tree: a tree of its own over the base's tensors.
        first_pass: runs the tree; what it never calls is left as it is.
        slots: kind and shape of every tensor.
        change: what a fixed model adds to a matrix; none for what has no factors.
    """
    called: set[str] = set()
    handles = [m.register_forward_pre_hook(lambda *_, p=p: called.add(p)) for p, m in tree.named_modules()]
    first_pass(probe_inputs(tree))
    for handle in handles:
        handle.remove()
    for name in tensors.touched():
        slot = slots[name]
        owners = [n for n in (slot.name, *slot.aliases) if n.rpartition(".")[0] in called]
        if not owners:
            continue
        base = tree.get_parameter(owners[0]) if not slot.buffer else tree.get_buffer(owners[0])
        matrix = change(name)
        if matrix is not None:
            value = base + from_matrix(matrix, slot).to(base.dtype)
        elif base.is_floating_point():
            own = [tensors.whole(t, name) for t in range(len(tensors.names))]
            value = torch.stack([base if v is None else v for v in own]).mean(0)
        else:
            continue
        for owner in owners:
            module = tree.get_submodule(owner.rpartition(".")[0])
            setattr(
                module, owner.rpartition(".")[2], nn.Parameter(value, requires_grad=False) if not slot.buffer else value
            )
