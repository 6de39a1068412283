"""What was answered, by task, since the start and minute by minute; nothing of the inputs is kept."""

from __future__ import annotations

import time
from collections import Counter, deque
from datetime import UTC, datetime
from typing import Any

from massmerge.model.answers import Prediction
from massmerge.serve.batching import Fault

MINUTES = 15
_LATENCIES = 1000
_ABSTAINED, _FAULTY = object(), object()


class Traffic:
    """Counts of answers. Only the event loop's thread uses it."""

    def __init__(self) -> None:
        self._began = time.time()
        self._total: Counter[object] = Counter()
        self._minutes: deque[tuple[int, Counter[object]]] = deque(maxlen=MINUTES)
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)

    def count(self, results: list[Prediction | Fault]) -> None:
        """Note the answers of a request."""
        minute = int(time.time() // 60)
        if not self._minutes or self._minutes[-1][0] != minute:
            self._minutes.append((minute, Counter()))
        kinds = [_kind(result) for result in results]
        self._total.update(kinds)
        self._minutes[-1][1].update(kinds)

    def took(self, seconds: float) -> None:
        """Note how long a request took."""
        self._latencies.append(1000 * seconds)

    def report(self, waiting: int, limit: int) -> dict[str, Any]:
        """Everything, as `/v1/traffic` answers it."""
        now = int(time.time() // 60)
        return {
            "since": _iso(self._began),
            "seconds": round(time.time() - self._began, 1),
            **_counts(self._total),
            "recent": [
                {"minute": _iso(60 * minute), **_counts(counter)}
                for minute, counter in self._minutes
                if now - minute < MINUTES
            ],
            "latency_ms": self._quantiles(),
            "queue": {"waiting": waiting, "limit": limit},
        }

    def _quantiles(self) -> dict[str, float | None]:
        ordered = sorted(self._latencies)
        shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
        if not ordered:
            return dict.fromkeys(shares)
        return {name: round(ordered[int(share * (len(ordered) - 1))], 3) for name, share in shares.items()}


def _kind(result: Prediction | Fault) -> object:
    if isinstance(result, Fault):
        return _FAULTY
    return _ABSTAINED if result.task is None else result.task


def _counts(counter: Counter[object]) -> dict[str, Any]:
    tasks = {task: count for task, count in counter.items() if isinstance(task, str)}
    return {"tasks": tasks, "abstentions": counter[_ABSTAINED], "errors": counter[_FAULTY]}


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
