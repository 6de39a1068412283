"""Obviously right twins of the static merges: whole experts in memory, flattened vectors, loops over tasks, float64.

Each takes the deltas of every task, `{task: {tensor: delta}}`, and returns the change of every tensor, `{tensor: change}`;
of the methods that keep the tasks apart, for each task.
"""

from __future__ import annotations

import torch
from torch import Tensor

from naive import polar, truncated_product

State = dict[str, Tensor]


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of a tiny model is a matrix that acts on activations."""
    return name.endswith(".weight") and tensor.dim() >= 2


def flatten(state: State) -> Tensor:
    """Every tensor as one vector."""
    return torch.cat([tensor.double().flatten() for tensor in state.values()])


def unflatten(vector: Tensor, like: State) -> State:
    """The tensors of a vector."""
    parts = torch.split(vector, [tensor.numel() for tensor in like.values()])
    return {name: part.reshape(like[name].shape) for name, part in zip(like, parts, strict=True)}


def total(deltas: dict[str, State]) -> State:
    """The sum over the tasks."""
    names = next(iter(deltas.values()))
    return {name: sum(state[name].double() for state in deltas.values()) for name in names}


def scaled(change: State, scale: float) -> State:
    """Every tensor times a number."""
    return {name: scale * tensor for name, tensor in change.items()}


def average(deltas: dict[str, State]) -> State:
    """The mean over the tasks."""
    return scaled(total(deltas), 1 / len(deltas))


def ties(deltas: dict[str, State], keep: float, combine: str) -> State:
    """Trim, elect, merge, as the paper's algorithm goes through one vector for each task."""
    like = next(iter(deltas.values()))
    rows = []
    for state in deltas.values():
        vector = flatten(state)
        kept = vector.abs().sort(descending=True).values[max(1, int(keep * len(vector))) - 1]
        rows.append(torch.where(vector.abs() >= kept, vector, 0.0))
    table = torch.stack(rows)
    sign = torch.sign(table.sum(0))
    sign[sign == 0] = torch.sign(sign.sum())
    agreeing = torch.where(table * sign > 0, table, 0.0)
    merged = agreeing.sum(0)
    if combine == "mean":
        merged = merged / (agreeing != 0).sum(0).clamp_min(1)
    return unflatten(merged, like)


def consensus(deltas: dict[str, State], threshold: float, least: int) -> State:
    """The sum where enough masks are set, counted mask by mask."""
    everything, change = total(deltas), {}
    for name, together in everything.items():
        masks = [state[name].abs() > threshold * (together - state[name]).abs() for state in deltas.values()]
        votes = torch.stack(masks).int().sum(0)
        change[name] = torch.where(votes >= least, together, 0.0)
    return change


def _matrices(deltas: dict[str, State], merge) -> State:
    """A merge of matrices; other tensors averaged."""
    change = average(deltas)
    for name, tensor in change.items():
        if is_matrix(name, tensor):
            change[name] = merge([s[name].double().flatten(1) for s in deltas.values()]).reshape(tensor.shape)
    return change


def iso_c(deltas: dict[str, State], scale: float) -> State:
    """The sum's singular values replaced by their mean."""

    def merge(given: list[Tensor]) -> Tensor:
        u, s, v = torch.linalg.svd(sum(given), full_matrices=False)
        return scale * u @ torch.diag(torch.full_like(s, s.mean())) @ v

    return _matrices(deltas, merge)


def iso_cts(deltas: dict[str, State], common: float, scale: float) -> State:
    """Common directions first, then each task's own, orthogonalised, with equal singular values."""

    def merge(given: list[Tensor]) -> Tensor:
        u, s, v = torch.linalg.svd(sum(given), full_matrices=False)
        size = len(s)
        own = round((size - int(common * size)) / len(given))
        shared = size - own * len(given)
        left, values, right = [u[:, :shared]], [s[:shared]], [v[:shared]]
        for delta in given:
            rest = delta - u[:, :shared] @ u[:, :shared].mT @ delta
            a, b, c = torch.linalg.svd(rest, full_matrices=False)
            left.append(a[:, :own])
            values.append(b[:own])
            right.append(c[:own])
        return scale * torch.cat(values).mean() * polar(torch.cat(left, 1)) @ polar(torch.cat(right))

    return _matrices(deltas, merge)


def tsv_c(deltas: dict[str, State], task: str) -> State:
    """The task's own delta, its matrices truncated to 1/T of their rank; those smaller than T are kept whole."""
    change = {}
    for name, delta in deltas[task].items():
        change[name] = delta.double()
        k = min(delta.flatten(1).shape) // len(deltas) if is_matrix(name, delta) else 0
        if k:
            change[name] = truncated_product(delta.flatten(1), k).reshape(delta.shape)
    return change


def emr(deltas: dict[str, State], task: str) -> State:
    """Elect, mask and rescale, entry by entry."""
    unified, sizes, left = {}, 0.0, 0.0
    for name in deltas[task]:
        stack = torch.stack([state[name].double() for state in deltas.values()])
        sign = torch.where(stack.sum(0) > 0, 1.0, -1.0)
        unified[name] = sign * (stack * sign).clamp_min(0).max(0).values
        mask = deltas[task][name] * sign > 0
        sizes += float(deltas[task][name].double().abs().mean())
        left += float((unified[name] * mask).abs().mean())
    return {name: sizes / left * tensor * (deltas[task][name] * tensor > 0) for name, tensor in unified.items()}
