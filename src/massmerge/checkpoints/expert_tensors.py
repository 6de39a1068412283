"""What an expert holds of one tensor: its own value or its delta, and what a merge keeps of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from massmerge.checkpoints.skeleton import Kind, Slot, from_matrix, to_matrix
from massmerge.errors import InputError
from massmerge.io.placement import moved
from massmerge.linalg.factors import Factors, energy_rank, lora_svd, remaining_energy, truncated_svd

_NOISE = 1e-6
_LARGEST = torch.finfo(torch.float32).max ** 0.5  # norms and residuals square what they see


class Kept(NamedTuple):
    """What is kept of one task's delta of one matrix, and how much that is."""

    factors: Factors
    norm: float
    """Length of the whole delta."""
    energy: float
    """Share of its square that the factors hold."""


class ExpertTensor(ABC):
    """One tensor as an expert gives it, whatever the expert was stored as."""

    needs_base = True
    """Whether the delta is known from the base's tensor only."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that were read."""

    @abstractmethod
    def matrix(self, base: Tensor, kind: Kind) -> Tensor:
        """The delta in float32 as the matrix (out, in) that acts on activations."""

    @abstractmethod
    def keep(self, base: Tensor, kind: Kind, rank: int, energy: float | None = None) -> Kept | None:
        """The factors of the delta.

        Args:
            base: the base's tensor.
            kind: how the tensor acts on activations.
            rank: how many triplets.
            energy: the share of energy to keep, in place of a rank.

        Returns:
            None where the delta is zero.
        """

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return self if device.type == "cpu" else moved(self, device)

    def delta(self, base: Tensor, slot: Slot) -> Tensor:
        """The delta in float32, in the tensor's own shape."""
        return from_matrix(self.matrix(base, slot.kind), slot)

    def value(self, base: Tensor, slot: Slot) -> Tensor:
        """The expert's own tensor."""
        return base.float() + self.delta(base, slot)


@dataclass(frozen=True, eq=False)
class FullTensor(ExpertTensor):
    """A tensor of a whole checkpoint, or one that an adapter saved whole."""

    tensor: Tensor

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensor."""
        return (self.tensor,)

    def matrix(self, base: Tensor, kind: Kind) -> Tensor:
        """Expert minus base."""
        return to_matrix(difference(base, self.tensor), kind)

    def keep(self, base: Tensor, kind: Kind, rank: int, energy: float | None = None) -> Kept | None:
        """The first triplets of the delta's SVD."""
        change = self.matrix(base, kind)
        total = float(change.double().square().sum())
        if total == 0.0:
            return None
        k = rank if energy is None else energy_rank(change, energy)
        cut = _real(truncated_svd(change, k), k)
        return Kept(cut, total**0.5, max(0.0, 1.0 - remaining_energy(change, cut) / total))

    def delta(self, base: Tensor, slot: Slot) -> Tensor:
        """Expert minus base."""
        return difference(base, self.tensor)

    def value(self, base: Tensor, slot: Slot) -> Tensor:
        """The tensor."""
        return self.tensor


@dataclass(frozen=True, eq=False)
class LowRank(ExpertTensor):
    """A delta given as a product: `b (m, r) @ a (r, n)`, in the matrix view of the tensor."""

    b: Tensor
    a: Tensor
    needs_base = False

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The two thin matrices."""
        return self.b, self.a

    def matrix(self, base: Tensor, kind: Kind) -> Tensor:
        """The product."""
        return self.b.float() @ self.a.float()

    def keep(self, base: Tensor, kind: Kind, rank: int, energy: float | None = None) -> Kept | None:
        """The first triplets of the product's SVD."""
        factors = lora_svd(self.b, self.a)
        squares = factors.s.double().square()
        total = float(squares.sum())
        if total == 0.0:
            return None
        k = rank if energy is None else int((squares.cumsum(0) < energy * total).sum()) + 1
        cut = _real(factors, k)
        return Kept(cut, total**0.5, max(0.0, 1.0 - float(squares[cut.rank :].sum()) / total))


def difference(base: Tensor, expert: Tensor) -> Tensor:
    """Expert minus base, in float32.

    An expert saved in less precision than the base is compared with the base in that precision: otherwise every tensor that
    fine-tuning left alone would come out as a delta made of rounding errors.
    """
    if base.is_floating_point() and expert.dtype.itemsize < base.dtype.itemsize:
        base = base.to(expert.dtype)
    return expert.float() - base.float()


def finite(tensor: Tensor, where: str, name: str) -> Tensor:
    """The tensor, if a model can compute with every number in it.

    Raises:
        InputError: it holds NaN or infinity, or numbers whose squares are infinite in float32.
    """
    if tensor.is_floating_point() and tensor.numel():
        most = float(torch.stack(tensor.aminmax()).float().abs().max())
        if not most < _LARGEST:  # NaN too, which is less than nothing
            what = f"numbers up to {most:.1e}, too large for float32" if math.isfinite(most) else "NaN or infinity"
            raise InputError(f"{where}: {name} holds {what}. Fine-tune or save it again.")
    return tensor


def _real(factors: Factors, rank: int) -> Factors:
    """The first triplets, without those beyond the rank of the delta.

    Directions of a rank-deficient delta beyond its rank are rounding; in a merge they would push real ones aside.
    """
    return factors.first(min(rank, max(1, int((factors.s > _NOISE * factors.s[0]).sum()))))
