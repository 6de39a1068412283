"""The way of the authors' code, which `answer_cost.py stream` compares with: a dense merged model for each set of tasks."""

import copy
import statistics
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPVisionModel

import massmerge as mm
from massmerge.linalg.factors import Factors

KEPT_MODELS = 6  # more of them all go, after the batch


class Rebuilding:
    """The way of the authors' code: a dense merged model for each set, all dropped after a batch that leaves more than six.

    The fixed model of the first pass is one more such model, of all tasks, and is built at every start.

    Args:
        path: a bundle.
        base: its base, as transformers runs it.
        spared: leave out the two SVDs a matrix that their code runs for sets of one task too, where they change nothing.
    """

    def __init__(self, path: Path, base: CLIPVisionModel, *, spared: bool = False) -> None:
        self._spared = spared
        self._bundle = mm.Bundle(path, check=False)
        self._base = base
        self._cache: dict[tuple[str, ...], CLIPVisionModel] = {}
        self.seconds: dict[int, list[float]] = {}
        """What building took, by the number of tasks of a set."""
        names = list(self._bundle.ranks)
        self._factors = {t.name: {n: self._bundle.factors(t.name, n) for n in names} for t in self._bundle.tasks}
        self._fixed = self._build(tuple(self._factors))

    def model(self, tasks: tuple[str, ...]) -> CLIPVisionModel:
        """The merged model of a set; sets are known by the order in which their tasks were selected."""
        if tasks not in self._cache:
            began = time.perf_counter()
            self._cache[tasks] = self._build(tasks)
            self.seconds.setdefault(len(tasks), []).append(time.perf_counter() - began)
        return self._cache[tasks]

    @torch.inference_mode()
    def _build(self, tasks: tuple[str, ...]) -> CLIPVisionModel:
        model = copy.deepcopy(self._base)
        for name, parameter in model.named_parameters():
            if name in self._bundle.ranks:
                found = [f for t in tasks if (f := self._factors[t][name]) is not None]
                parameter += _dense(found, self._spared).reshape(parameter.shape)
            else:
                values = [v for t in tasks if (v := self._bundle.whole(t, name)) is not None]
                if values:
                    parameter.copy_(torch.stack(values).mean(0))
        return model

    @torch.inference_mode()
    def run(self, batch: Tensor, sets: list[list[str]]) -> None:
        """Answer a batch: a first pass through the whole network, then a group of inputs for each set."""
        self._fixed(pixel_values=batch)
        for tasks in dict.fromkeys(tuple(s) for s in sets):
            rows = torch.tensor([i for i, s in enumerate(sets) if tuple(s) == tasks])
            self.model(tasks)(pixel_values=batch[rows])
        if len(self._cache) > KEPT_MODELS:
            self._cache.clear()

    def seconds_a_batch(self, taken: float, plan: list[list[list[str]]], every: int) -> float:
        """What a batch of the whole stream takes, from the time of every so many-th of its batches.

        Those build more models than others do: nothing is left of the batch before. So passes are as they were timed, and
        building is the mean time of a model times how many the stream needs.
        """
        passes = (taken - sum(map(sum, self.seconds.values()))) / len(plan[::every])
        mean = {size: statistics.mean(times) for size, times in self.seconds.items()}
        models = models_built(plan)
        return passes + sum(n * mean.get(size, max(mean.values())) for size, n in models.items()) / len(plan)


def models_built(plan: list[list[list[str]]]) -> Counter[int]:
    """How many models of each number of tasks rebuilding makes in a stream, with its cache."""
    found: Counter[int] = Counter()
    kept: set[tuple[str, ...]] = set()
    for sets in plan:
        wanted = set(map(tuple, sets))
        found.update(len(tasks) for tasks in wanted - kept)
        kept |= wanted
        if len(kept) > KEPT_MODELS:
            kept = set()
    return found


def _dense(found: list[Factors], spared: bool) -> Tensor:
    if len(found) == 1 and spared:
        return found[0].dense()
    u, v = torch.cat([f.u for f in found], 1), torch.cat([f.v for f in found])
    pu, _, qu = torch.linalg.svd(u, full_matrices=False)
    pv, _, qv = torch.linalg.svd(v, full_matrices=False)
    return (pu @ qu * torch.cat([f.s for f in found])) @ (pv @ qv)
