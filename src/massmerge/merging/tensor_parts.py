"""The tensors of a bundle, one part each: factors of every task and what is known of them together."""

from __future__ import annotations

import math
from functools import cache, partial

import torch
from torch import Tensor

from massmerge.bundle.encoding import decode, encode, stored_type
from massmerge.checkpoints.expert_tensors import difference
from massmerge.errors import InputError
from massmerge.linalg.factors import Factors, accept_distinct, core_matrix, cosine_matrix, similarity
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.merging.originals import KeptOf, Originals
from massmerge.merging.plan import TensorPlan
from massmerge.merging.static.parts import StaticParts


class TensorParts:
    """Makes the part of each tensor, of a bundle or of a static merge."""

    def __init__(self, prepared: OpenedRecipe) -> None:
        self._prepared = prepared
        self.originals = Originals(prepared)
        self._order = self.originals.tasks
        self.static = StaticParts(prepared) if prepared.recipe.merge.static else None

    def part(self, tensor: TensorPlan, kept: KeptOf | None = None) -> dict[str, Tensor]:
        """What a tensor becomes.

        Args:
            tensor: the tensor.
            kept: gives the tasks' factors, if they were made before.

        Raises:
            InputError: it is not finite.
        """
        kept = kept or self.originals.kept
        given = {i: t for i, t in enumerate(self._order) if tensor.ranks[i]}
        if self.static is not None:
            part = self.static.part(tensor, kept)
        else:
            part = self._whole(tensor, given) if tensor.matrix is None else self._factored(tensor, given, kept)
        self._refuse_overflow(tensor, part)
        return {name: value.cpu() for name, value in part.items()}

    def _refuse_overflow(self, tensor: TensorPlan, part: dict[str, Tensor]) -> None:
        """Refuse what the sources' numbers, each of them finite, became: products and sums too large for their type."""
        if all(_is_finite(t) for t in part.values() if t.is_floating_point()):
            return
        large = [task for task, norm in zip(self._order, part["norm"].tolist(), strict=True) if not math.isfinite(norm)]
        raise InputError(
            f"{tensor.name}: the delta of {', '.join(large or self._order)} is too large for {tensor.dtype}: the "
            "result is not finite. Fine-tune or save the expert again, or leave the task out."
        )

    def _factored(self, tensor: TensorPlan, given: dict[int, str], kept_of: KeptOf) -> dict[str, Tensor]:
        """Factors of every task, and what is known of them together."""
        base = cache(partial(self.originals.base, tensor.name))  # adapters know their deltas without it
        found = {i: kept_of(tensor, task, base) for i, task in given.items()}
        kept = {i: one for i, one in found.items() if one is not None}
        assert tensor.matrix is not None
        dtype = stored_type(self._prepared.recipe.merge.factors, getattr(torch, tensor.dtype), tensor.matrix)
        stored = {i: encode(one.factors, dtype) for i, one in kept.items()}
        part = {f"{i}.{name}": tensor for i, parts in stored.items() for name, tensor in parts.items()}
        count = len(self._order)
        norm, energy, cosine = torch.zeros(count), torch.ones(count), torch.zeros(count, count)
        accepted = torch.zeros(count, dtype=torch.uint8)
        if kept:
            positions = list(kept)
            factors = [one.factors for one in kept.values()]
            norm[positions] = torch.tensor([one.norm for one in kept.values()])
            energy[positions] = torch.tensor([one.energy for one in kept.values()])
            similar = cosine_matrix(factors)
            cosine[torch.tensor(positions)[:, None], torch.tensor(positions)] = similar.float()
            chosen = self._distinct(factors, similar)
            accepted[[positions[j] for j in chosen]] = 1
            if self._prepared.recipe.router.first_pass == "fixed":
                # The core undoes what bases have in common, so it belongs to the factors that it will be multiplied with.
                part["core"] = self._core([decode(stored[positions[j]]) for j in chosen])
        return part | {"norm": norm, "energy": energy, "cosine": cosine, "accepted": accepted}

    def _distinct(self, factors: list[Factors], cosine: Tensor) -> list[int]:
        """Positions of the tasks that the fixed model is made of, in order."""
        redundancy = self._prepared.recipe.merge.redundancy
        if isinstance(redundancy, str):
            return list(range(len(factors)))
        alike = cosine if redundancy.metric == "cosine" else similarity(factors, redundancy.metric)
        return accept_distinct(alike, redundancy.threshold)

    def _core(self, factors: list[Factors]) -> Tensor:
        """The fixed model's core: float32, or float64 where rounding would show and no budget counts the bytes."""
        core = core_matrix(factors, torch.float64)
        size = torch.cat([f.s for f in factors]).norm()
        rounds = core.norm() * torch.finfo(torch.float32).eps > 1e-5 * size
        return core if rounds and self._prepared.recipe.merge.budget is None else core.float()

    def _whole(self, tensor: TensorPlan, given: dict[int, str]) -> dict[str, Tensor]:
        """The experts' own values where they differ from the base."""
        base = self.originals.base(tensor.name)
        part = {"norm": torch.zeros(len(self._order))}
        for i, task in given.items():
            value = self.originals.whole(tensor, task, base)
            part["norm"][i] = float(difference(base, value).double().norm())
            if part["norm"][i] > 0 or not tensor.in_base:
                part[f"{i}.whole"] = value.to(base.dtype).contiguous()
        return part


def _is_finite(tensor: Tensor) -> bool:
    """Whether every number is: the extremes tell, and need no memory of the tensor's size."""
    return not tensor.numel() or all(math.isfinite(extreme) for extreme in torch.stack(tensor.aminmax()).tolist())
