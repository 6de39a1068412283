"""The tasks' subspaces at sites, each made once while routers are made of them."""

from __future__ import annotations

import torch
from torch import Tensor

from massmerge.bundle.factors import TaskTensors
from massmerge.routing import Site
from massmerge.routing.projection import of_common_rank, site_basis
from massmerge.routing.separation import Separation, mean_separation, separation


class SiteBases:
    """What the factors of a bundle's tasks tell of sites. Kept as long as routers are made: to make them takes a while.

    Args:
        tensors: the tasks' factors.
    """

    def __init__(self, tensors: TaskTensors) -> None:
        self.tensors = tensors
        self._rows: dict[tuple[int, str], Tensor] = {}
        self._found: dict[str, Separation] = {}

    def rows(self, task: int, site: Site) -> Tensor:
        """Right singular vectors `v (k, d)` of a task's deltas at a site; k is 0 where it changes nothing."""
        key = task, site.name
        if key not in self._rows:
            found = [f for name in site.tensors if (f := self.tensors.exact(task, name)) is not None]
            none = torch.zeros(0, site.width)
            rank = max((f.rank for f in found), default=0)
            self._rows[key] = site_basis([(f.s, f.v) for f in found], rank) if found else none
        return self._rows[key]

    def common(self, tasks: list[int], site: Site) -> list[Tensor]:
        """The first rows of some tasks, as many as all of them have and the bundle routes by."""
        return of_common_rank([self.rows(task, site) for task in tasks], self.tensors.routing_rank(site.width))

    def separation(self, sites: list[Site]) -> Separation:
        """How the subspaces of the tasks with experts of their own lie to each other."""
        distinct = list(dict.fromkeys(self.tensors.targets))
        for site in sites:
            if site.name not in self._found:
                self._found[site.name] = separation([self.common(distinct, site)])
        return mean_separation([self._found[site.name] for site in sites])
