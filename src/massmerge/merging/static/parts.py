"""The tensors of a static merge: one after the other, after as many looks at all of them as the method needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from massmerge.checkpoints.expert_tensors import difference
from massmerge.checkpoints.skeleton import from_matrix
from massmerge.linalg.factors import Factors
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.merging.originals import KeptOf, Originals
from massmerge.merging.plan import TensorPlan
from massmerge.merging.static import (
    KEEPING_METHODS,
    STATIC_METHODS,
    Deltas,
    KeepingMethod,
    Known,
    Round,
    StaticMethod,
    average,
)
from massmerge.merging.static.scales import scale_of
from massmerge.merging.static.spans import Spans


class StaticParts:
    """Makes the parts of a static merge, a tensor's each.

    A part holds `merged`, the tensor itself; where the method keeps the tasks apart, their compressed form instead. Both
    hold `norm`, the length of each task's delta.
    """

    def __init__(self, prepared: OpenedRecipe) -> None:
        options = prepared.recipe.merge
        self._originals = Originals(prepared)
        self._slots = prepared.base.slots
        self._method: StaticMethod | KeepingMethod = (
            KEEPING_METHODS[options.method] if options.keeps_tasks else STATIC_METHODS[options.method]
        )
        floating = [n for n in self._slots if prepared.base.info(n).dtype.is_floating_point]
        entries = sum(math.prod(self._slots[name].shape) for name in floating)
        self._known = Known(self._originals.tasks, entries, options.own())
        self._scale = scale_of(options.method, len(self._known.tasks), options.own())
        self._looked_at = [i for i, t in enumerate(prepared.plan.tensors) if _is_merged(t)]

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Looks at all tensors that the method takes before it merges the first."""
        return self._method.rounds

    @property
    def looked_at(self) -> list[int]:
        """The tensors that are looked at, by their places in the plan."""
        return self._looked_at

    def figures(self, tensors: Mapping[int, TensorPlan], step: int, found: Mapping[str, Any]) -> dict[str, Tensor]:
        """What one look sees of tensors: figures of each under its place, or one sum of them where sums are exact."""
        self.know(found)
        look = self._method.rounds[step].look
        seen: dict[str, Tensor] = {}
        for place, tensor in tensors.items():
            for deltas in self._looked(tensor):
                figures = look(deltas, self._known)
                if figures.is_floating_point():
                    seen[str(place)] = figures
                else:  # whole numbers add up to the same in any order
                    seen["sum"] = seen["sum"].add_(figures) if "sum" in seen else figures
        return seen

    def _looked(self, tensor: TensorPlan) -> Iterator[Deltas]:
        """A tensor's deltas for a look, in spans where the method allows it."""
        spans = self._spans(tensor)
        if spans is None:
            yield self._deltas(tensor, self._originals.base(tensor.name), self._originals.kept)
        else:
            yield from (span.deltas for span in spans)

    def conclude(self, step: int, seen: Iterable[dict[str, Tensor]]) -> dict[str, Any]:
        """What follows from a look at all tensors; figures are added up in the order of the plan."""
        total, places = torch.zeros(()), dict[int, Tensor]()
        for figures in seen:
            places |= {int(place): tensor for place, tensor in figures.items() if place != "sum"}
            if "sum" in figures:
                total = total.to(figures["sum"].dtype) + figures["sum"]
        for place in sorted(places):
            total = total.to(places[place].dtype) + places[place]
        self._known.found.update(self._method.rounds[step].conclude(total, self._known))
        return dict(self._known.found)

    def know(self, found: Mapping[str, Any]) -> None:
        """What looks at all tensors have found, by whichever worker."""
        self._known.found.update(found)

    def part(self, tensor: TensorPlan, kept: KeptOf) -> dict[str, Tensor]:
        """What a tensor becomes; `kept` gives the tasks' factors."""
        if (spans := self._spans(tensor)) is not None:
            return {"merged": self._by_span(spans), "norm": spans.squares.sqrt().float()}
        base = self._originals.base(tensor.name)
        norm = torch.zeros(len(self._known.tasks))
        if not tensor.in_base or (isinstance(self._method, KeepingMethod) and not self._applies(tensor)):
            part = self._own(tensor, base, norm)
        elif isinstance(self._method, KeepingMethod):
            part = self._method.compress(self._deltas(tensor, base, kept, norm), self._known)
            part = {name: _stored(name, value, base.dtype) for name, value in part.items()}
        else:
            part = {"merged": self._one(tensor, base, kept, norm)}
        return part | {"norm": norm}

    def _spans(self, tensor: TensorPlan) -> Spans | None:
        """The tensor in spans, if method and files allow it."""
        by_number = isinstance(self._method, StaticMethod) and self._method.elementwise
        return Spans.of(tensor, self._originals) if by_number and _is_merged(tensor) else None

    def _by_span(self, spans: Spans) -> Tensor:
        """The tensor of one merged model, whose numbers are the same as those of `_one`."""
        assert isinstance(self._method, StaticMethod)
        out = torch.empty(spans.tensor.shape, dtype=spans.dtype)
        for span in spans:
            change = self._scale * self._method.merge(span.deltas, self._known)
            out.view(-1)[span.start : span.stop] = span.base.float() + change
        return out

    def _applies(self, tensor: TensorPlan) -> bool:
        """Whether the method is for this tensor, and not only for matrices."""
        return _is_merged(tensor) and (tensor.matrix is not None or not self._method.matrices)

    def _one(self, tensor: TensorPlan, base: Tensor, kept: KeptOf, norm: Tensor) -> Tensor:
        """The tensor of one merged model; integers stay the base's."""
        deltas = self._deltas(tensor, base, kept, norm)
        assert not isinstance(self._method, KeepingMethod)
        if not base.is_floating_point():
            deltas.sum()  # for the norms
            return base
        change = self._scale * self._method.merge(deltas, self._known) if self._applies(tensor) else average(deltas)
        change = change if tensor.matrix is None else from_matrix(change, self._slots[tensor.name])
        return (base.float() + change).to(base.dtype)

    def _own(self, tensor: TensorPlan, base: Tensor, norm: Tensor) -> dict[str, Tensor]:
        """The experts' own values: of tensors that the base lacks their mean, where one model is made of all."""
        values: dict[str, Tensor] = {}
        for task in self._originals.touching(tensor):
            value = self._originals.whole(tensor, task, base)
            length = float(difference(base, value).double().norm())
            norm[self._known.tasks.index(task)] = length
            if length > 0 or not tensor.in_base:
                values[f"{task}.whole"] = value.to(base.dtype)
        if isinstance(self._method, KeepingMethod):
            return values
        return {"merged": torch.stack([value.float() for value in values.values()]).mean(0).to(base.dtype)}

    def _deltas(self, tensor: TensorPlan, base: Tensor, kept: KeptOf, norm: Tensor | None = None) -> Deltas:
        """The tensor's deltas; the lengths of those that are read are written to `norm`."""

        def read(task: str) -> Tensor:
            """A task's delta, its length noted."""
            found = self._originals.delta(tensor, task, base)
            if norm is not None:
                norm[self._known.tasks.index(task)] = float(found.double().norm())
            return found

        def factor(task: str) -> Factors | None:
            """A task's factors, the length of its delta noted."""
            found = kept(tensor, task, lambda: base)
            if norm is not None and found is not None:
                norm[self._known.tasks.index(task)] = found.norm
            return found.factors if found is not None else None

        shape = tensor.matrix or tensor.shape
        tasks = self._originals.touching(tensor)
        return Deltas(tensor.name, shape, len(self._known.tasks), tasks, read, factor, self._originals.device)


def _is_merged(tensor: TensorPlan) -> bool:
    return tensor.in_base and getattr(torch, tensor.dtype).is_floating_point


def _stored(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors and unified deltas in the base's precision; singular values and scales are few, masks are bits."""
    return value.to(dtype) if name == "unified" or name.endswith((".u", ".v")) else value
