"""What a selected set of tasks changes in the base: the adaptive merge, without a dense weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from massmerge.checkpoints.skeleton import Slot, to_matrix
from massmerge.linalg.factors import Factors, quick_core, weighted_core

Variant = Literal["orthogonal", "plain", "weighted", "mixture"]


class LowRankChange(NamedTuple):
    """`Σ_ij U_i C_ij V_j`, kept as the tasks' own factors and the small core between them."""

    us: tuple[Tensor, ...]
    core: Tensor
    """(R, R); for one task its singular values (k,), which is the core's diagonal."""
    vs: tuple[Tensor, ...]

    def shrink(self, x: Tensor) -> Tensor:
        """Activations (rows, n) into the subspace and through the core: (rows, R)."""
        x = x.to(self.vs[0].dtype)  # some models keep a layer in float32 and all others in float16
        inner = _projected(self.vs[0], x) if len(self.vs) == 1 else torch.cat([_projected(v, x) for v in self.vs])
        return (self.core[:, None] * inner if self.core.ndim == 1 else self.core @ inner).mT

    def add_to(self, rows: Tensor, inner: Tensor) -> None:
        """Add the update of `inner (rows, R)` to `rows (rows, m)`."""
        for u, part in zip(self.us, torch.split(inner, [u.shape[1] for u in self.us], 1), strict=True):
            if rows.dtype == u.dtype:
                rows.addmm_(part, u.mT)
            else:
                rows += part @ u.mT

    def dense(self) -> Tensor:
        """The update as a matrix (m, n)."""
        core = torch.diag(self.core) if self.core.ndim == 1 else self.core
        return torch.cat(self.us, 1) @ core @ torch.cat(self.vs, 0)


def _projected(v: Tensor, x: Tensor) -> Tensor:
    """`v (k, n)` times the activations `x (rows, n)`: (k, rows)."""
    return v @ x.mT  # the thin matrix on the left is multiplied a quarter faster than on the right


def exact_change(delta: Tensor) -> LowRankChange:
    """A dense delta (m, n) as an update: a factor beside the identity, so that nothing is cut off."""
    side = torch.eye(min(delta.shape), dtype=delta.dtype, device=delta.device)
    u, v = (side, delta) if delta.shape[0] <= delta.shape[1] else (delta, side)
    return LowRankChange((u,), side.diagonal(), (v,))


class Change(NamedTuple):
    """What a set changes in one tensor: a low-rank update, or a value instead of the base's."""

    update: LowRankChange | None = None
    value: Tensor | None = None


class SetChanges:
    """The changes of one selected set, by tensor; made when first asked for.

    Args:
        tasks: positions of the tasks, best first.
        factors: gives a task's factors of a matrix, or none.
        whole: gives a task's own value of a tensor, or none.
        base: gives the base's value of a tensor.
        variant: `orthogonal` is TSV-M inside the set, `weighted` the same with each task's singular vectors scaled by its
            weight first; `plain` is the sum of the deltas, `mixture` their mean by the weights.
        weights: of the tasks, for `weighted` and `mixture`.
        slots: kind and shape of every tensor; layers take the change of a matrix as an update, even of one kept whole.
    """

    def __init__(
        self,
        tasks: tuple[int, ...],
        factors: Callable[[int, str], Factors | None],
        whole: Callable[[int, str], Tensor | None],
        base: Callable[[str], Tensor | None],
        variant: Variant = "orthogonal",
        weights: Sequence[float] | None = None,
        slots: Mapping[str, Slot] | None = None,
    ) -> None:
        self.tasks, self.variant, self.weights = tasks, variant, weights
        self._slots = slots or {}
        self._factors, self._whole, self._base = factors, whole, base
        self._made: dict[str, Change] = {}
        self.modules: dict[int, nn.Module] = {}
        """The set's own copies of modules that are not layers."""
        self.materialised: dict[str, Tensor] = {}
        """Dense weights, while a cache holds them."""

    def change(self, tensor: str) -> Change:
        """What the set changes in that tensor."""
        if tensor not in self._made:
            self._made[tensor] = self._make(tensor)
        return self._made[tensor]

    def _make(self, tensor: str) -> Change:
        found = [(i, f) for i, t in enumerate(self.tasks) if (f := self._factors(t, tensor)) is not None]
        if found:
            return Change(update=self._merged([f for _, f in found], [i for i, _ in found]))
        value, base = self._mean(tensor), self._base(tensor)
        slot = self._slots.get(tensor)
        if value is None or base is None or slot is None or slot.matrix is None or not value.is_floating_point():
            return Change(value=value)
        return Change(update=exact_change(to_matrix(value - base, slot.kind)))

    def _mean(self, tensor: str) -> Tensor | None:
        """The mean of the tasks' own values, the base's for a task that has none; none where no task has one."""
        values = [self._whole(t, tensor) for t in self.tasks]
        if len(values) == 1 or all(v is None for v in values):
            return values[0]
        base = self._base(tensor)
        present = [v if v is not None else base for v in values]
        # A tensor that only experts have has no base value: the mean is over the tasks that have it.
        real = [v for v in present if v is not None]
        if not real[0].is_floating_point():
            return real[0]
        return torch.stack([v.float() for v in real]).mean(0).to(real[0].dtype)

    def _merged(self, factors: list[Factors], positions: list[int]) -> LowRankChange:
        us, vs = tuple(f.u for f in factors), tuple(f.v for f in factors)
        return LowRankChange(us, self._core(factors, positions).to(us[0].dtype), vs)

    def _core(self, factors: list[Factors], positions: list[int]) -> Tensor:
        if self.variant == "mixture" and self.weights is not None:
            shares = [self.weights[i] / sum(self.weights) for i in positions]
            return torch.cat([f.s * share for f, share in zip(factors, shares, strict=True)])
        if len(factors) == 1 or self.variant == "plain":
            return torch.cat([f.s for f in factors])
        if self.variant == "weighted" and self.weights is not None:
            return weighted_core(factors, [self.weights[i] for i in positions])
        return quick_core(factors)
