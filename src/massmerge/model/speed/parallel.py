"""A batch divided among threads that have one core each.

A pass over a mixed batch is a thousand small products. On two cores together each of them waits for both; on one core each,
with half of the inputs, none waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch

from massmerge.model.speed import plain

_T = TypeVar("_T")
_P = TypeVar("_P")
_LEAST = 8  # inputs that are worth a thread of their own
_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def parts_of(batch: int, device: torch.device) -> list[slice]:
    """Successive rows of a batch, a part for each core; one part where there are too few rows, or no CPU."""
    threads = torch.get_num_threads()
    if plain() or device.type != "cpu" or threads < 2 or batch < threads * _LEAST:
        return [slice(0, batch)]
    edges = [batch * i // threads for i in range(threads + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def even_order(rows: Sequence[int], costs: Sequence[float], parts: int) -> list[int]:
    """An order of groups of rows in which equal parts of all rows also cost about the same, and few groups are cut.

    >>> even_order([3, 1, 2, 2], [3, 2, 2, 2], 2)  # parts of four rows
    [0, 1, 2, 3]
    """
    room, spent = [sum(rows) / parts] * parts, [0.0] * parts
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for group in sorted(range(len(rows)), key=lambda g: -costs[g]):
        fitting = [part for part in range(parts) if room[part] >= rows[group]]
        part = min(fitting, key=spent.__getitem__) if fitting else max(range(parts), key=room.__getitem__)
        dealt[part].append(group)
        room[part] -= rows[group]
        spent[part] += costs[group]
    return [group for part in dealt for group in part]


def run_parts(run: Callable[[_P], _T], parts: Sequence[_P]) -> list[_T]:
    """What a function gives for each part, computed at the same time by as many threads as there are cores."""
    workers = min(len(parts), torch.get_num_threads())
    if workers < 2:
        return [run(part) for part in parts]
    return list(_pool(workers).map(run, parts))


def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that are kept: the number of cores that a thread may use is its own once it has been set."""
    with _lock:
        if workers not in _pools:
            before = torch.get_num_threads()
            ready = threading.Barrier(workers + 1)

            def begin() -> None:
                """Give a thread one core, and wait for the others."""
                torch.get_num_threads()  # the first question sets the number that all threads have; ours comes after
                torch.set_num_threads(1)
                ready.wait()

            pool = _pools[workers] = ThreadPoolExecutor(workers, "mass", initializer=begin)
            for _ in range(workers):
                pool.submit(int)  # starts a thread
            ready.wait()
            # Threads made from now on take the number that was set last.
            torch.set_num_threads(before)
        return _pools[workers]


# A forked child has the pools but none of their threads. Windows does not fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)
