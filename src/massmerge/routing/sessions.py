"""Inputs of one source share evidence: what earlier inputs of a session said of the tasks counts for the next ones."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from massmerge.errors import InputError

_A = TypeVar("_A")
Keys = str | int | Iterable[Hashable | None] | None
"""One key for all inputs, or one for each; None for inputs by themselves."""
DECAY = 0.7
"""Chosen on validation rows: loses little where a source keeps to a task, and little where it changes its task."""


@dataclass
class _State:
    """What is kept of a session: sums of scores (voters, T), how many inputs they stand for, and when it was last used."""

    total: Tensor
    weight: float
    used: float


class Sessions:
    """Remembers sessions from call to call: decaying sums of their inputs' scores, and nothing else of an input.

    Safe to use from several threads, and with several models: each has sums of its own.

    Args:
        decay: how much less earlier inputs count with each new one, from 0 (not at all) to 1 (as much as new ones).
        expiry: seconds without an input after which a session is forgotten.
        limit: how many sessions are remembered; beyond that the least recently used are forgotten.
        clock: gives the time in seconds.

    Raises:
        InputError: one of these is out of range.
    """

    def __init__(
        self,
        decay: float = DECAY,
        *,
        expiry: float = math.inf,
        limit: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= decay <= 1 or not expiry > 0 or limit < 1:
            raise InputError("sessions: decay is from 0 to 1, expiry more than 0 seconds, limit at least 1.")
        self._decay, self._expiry, self._limit, self._clock = decay, expiry, limit, clock
        self._tables: WeakKeyDictionary[Any, OrderedDict[Hashable, _State]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many sessions are remembered."""
        with self._lock:
            for table in self._tables.values():
                self._forget(table)
            return max(map(len, self._tables.values()), default=0)

    def clear(self) -> None:
        """Forget all sessions."""
        with self._lock:
            self._tables.clear()

    def combined(self, look: Any, keys: Sequence[Hashable | None], scores: list[Tensor]) -> list[Tensor]:
        """Scores with those of each input replaced by the mean over its session: this batch, and what came before.

        Args:
            look: who gave the scores; those of different looks cannot be added up.
            keys: session of each input; one without is left as it is, and so is one whose scores are not finite.
            scores: of each voter (inputs, T).
        """
        stacked = torch.stack(scores, 1)
        members: dict[Hashable, list[int]] = {}
        finite = stacked.isfinite().flatten(1).all(1).tolist()
        for i, key in enumerate(keys):
            if key is not None and finite[i]:
                members.setdefault(key, []).append(i)
        found = stacked.clone()
        with self._lock:
            table = self._tables.setdefault(look, OrderedDict())
            self._forget(table)
            for key, rows in members.items():
                found[rows] = self._add(table, key, stacked[rows])
            self._forget(table)
        return list(found.unbind(1))

    def _add(self, table: OrderedDict[Hashable, _State], key: Hashable, scores: Tensor) -> Tensor:
        """The mean (voters, T) of a session with new scores (n, voters, T)."""
        state = table.get(key) or _State(torch.zeros_like(scores[0]), 0.0, 0.0)
        kept = self._decay ** len(scores)
        total, weight = kept * state.total + scores.sum(0), kept * state.weight + len(scores)
        table[key] = _State(total, weight, self._clock())
        table.move_to_end(key)
        return total / weight

    def _forget(self, table: OrderedDict[Hashable, _State]) -> None:
        """Drop what is too old or too much; the least recently used comes first."""
        oldest = self._clock() - self._expiry
        while table and (len(table) > self._limit or next(iter(table.values())).used < oldest):
            table.popitem(last=False)


@dataclass(frozen=True)
class SessionKeys:
    """The sessions of a batch's inputs, and where they are remembered."""

    memory: Sessions
    keys: list[Hashable | None]

    def of(self, rows: Sequence[int]) -> SessionKeys:
        """The same of some of the inputs."""
        return SessionKeys(self.memory, [self.keys[i] for i in rows])


def session_batches(
    inputs: Iterable[Any], session: Keys, size: int
) -> Iterator[tuple[list[Hashable | None], list[Any]]]:
    """Keys and inputs of one batch after the other; a session whose inputs follow each other is not cut if it fits.

    Args:
        inputs: what to divide.
        session: a key for all of them, or one for each.
        size: most inputs of a batch.

    Raises:
        InputError: there are not as many keys as inputs, or a batch would hold none.
    """
    if size < 1:  # would divide nothing into nothing, without a word
        raise InputError("batch_size must be at least 1.")
    pairs = _pairs(inputs, session)
    ahead = 0 if session is None else 1
    held: list[tuple[Hashable | None, Any]] = []
    while held := [*held, *islice(pairs, size + ahead - len(held))]:
        end = len(held) if len(held) <= size else _cut([key for key, _ in held])
        yield [key for key, _ in held[:end]], [item for _, item in held[:end]]
        held = held[end:]


def all_together(inputs: Iterable[Any], session: Keys, answer: Callable[..., Iterable[_A]]) -> list[_A]:
    """Answers to inputs in their order, asked for in one in which the inputs of each session follow each other.

    Args:
        inputs: what to answer.
        session: a key for all of them, or one for each.
        answer: gives the answers to inputs, with their keys as `session`.

    Raises:
        InputError: there are not as many keys as inputs.
    """
    if session is None or isinstance(session, str | int):  # they follow each other already
        return list(answer(inputs, session=session))
    pairs = list(_pairs(inputs, session))
    first: dict[Hashable, int] = {}
    for i, (key, _) in enumerate(pairs):
        first.setdefault(key, i)
    order = sorted(range(len(pairs)), key=lambda i: i if pairs[i][0] is None else first[pairs[i][0]])
    found = answer([pairs[i][1] for i in order], session=[pairs[i][0] for i in order])
    return [one for _, one in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def _pairs(inputs: Iterable[Any], session: Keys) -> Iterator[tuple[Hashable | None, Any]]:
    if session is None or isinstance(session, str | int):
        yield from ((session, item) for item in inputs)
        return
    keys, none = iter(session), object()
    for item in inputs:
        key = next(keys, none)
        if key is none:
            raise InputError("session: more inputs than keys. Give one key for all inputs, or one for each.")
        yield key, item
    if next(keys, none) is not none:
        raise InputError("session: more keys than inputs. Give one key for all inputs, or one for each.")


def _cut(keys: list[Hashable | None]) -> int:
    """Where a batch ends so that the session of the input after it, the last of `keys`, begins with the next batch."""
    end = len(keys) - 1
    begin = end
    while begin and keys[begin] is not None and keys[begin - 1] == keys[end]:
        begin -= 1
    return begin or end
