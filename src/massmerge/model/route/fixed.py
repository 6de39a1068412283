"""The fixed model that the first pass runs if the recipe says so: the base with the merge of all tasks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from massmerge.bundle.factors import TaskTensors
from massmerge.bundle.layout import FIXED
from massmerge.bundle.reader import Bundle
from massmerge.checkpoints.skeleton import Slot, from_matrix
from massmerge.io.tensor_file import read_header, read_tensor
from massmerge.model.route.first_pass import FirstPass
from massmerge.routing.sites import probe_inputs


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
        chosen = [f for t in range(len(tensors.names)) if accepted[rows[name], t] and (f := tensors.exact(t, name))]
        core = read_tensor(cores[name])
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
            value = base + from_matrix(matrix, slot).to(base)
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
