"""Dense weights of sets that are used again and again, within a bound of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch

from massmerge.io.sizes import parse_bytes
from massmerge.model.second_pass.install import SecondPass
from massmerge.model.second_pass.updates import SetChanges

_HOT = 3  # uses after which a set is worth its memory


class DenseCache:
    """Holds the dense weights of the sets used most recently, as long as they fit.

    Args:
        size: the bound, in bytes or words; 0 holds nothing.
        second_pass: whose layers' weights are held.
    """

    def __init__(self, size: str | int, second_pass: SecondPass) -> None:
        self._limit = parse_bytes(size)
        self._second_pass = second_pass
        self._uses: dict[tuple[int, ...], int] = {}
        self._held: OrderedDict[tuple[int, ...], tuple[SetChanges, int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return sum(size for _, size in self._held.values())

    def use(self, sets: Sequence[SetChanges]) -> None:
        """Note that sets are about to run; materialise those that have become hot."""
        if self._limit == 0:
            return
        with self._lock:
            for changes in sets:
                if changes.weights is not None:  # made for one input, never seen again
                    continue
                self._uses[changes.tasks] = self._uses.get(changes.tasks, 0) + 1
                if self._held.get(changes.tasks, (None,))[0] is changes:
                    self._held.move_to_end(changes.tasks)
                elif self._uses[changes.tasks] >= _HOT:
                    self._hold(changes)

    @torch.inference_mode()
    def _hold(self, changes: SetChanges) -> None:
        self._held.pop(changes.tasks, None)  # the same set, made anew
        layers = self._second_pass.layers().values()
        size = sum(layer.weight.nbytes for layer in layers if layer.changed_by(changes))
        if size > self._limit:
            return
        while self._held and self.held_bytes + size > self._limit:
            _, (oldest, _) = self._held.popitem(last=False)
            oldest.materialised = {}
        dense = {layer.weight_name: layer.dense(changes) for layer in layers}
        changes.materialised = {name: weight for name, weight in dense.items() if weight is not None}
        self._held[changes.tasks] = changes, size
