"""A service under load: `python benchmarks/serve_load.py [throughput|latency|overload …]`.

The bundle is that of the text suite (`make suite-text`), or what `--bundle` names; texts are test rows of its tasks. Sides
of a ratio run in turns in one run on the same texts with the same number of threads: the service in its process, clients in
another, `predict` in this one. Ratios of time on a machine with other work are noisy, so work is compared too: seconds of
processor time of the service for an answer against those of `predict`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from threading import Event, Thread

import psutil
import torch

import massmerge as mm
from massmerge.io.rows import read_table
from serve_client import Load, Served, in_own_process, serving

SUITE = Path.home() / ".cache" / "massmerge" / "suites" / "text"
CLIENTS, BATCH = 32, 32
Row = tuple[str, str, str, bool]


def read_texts(bundle: Path, data: Path, most: int) -> list[str]:
    """Test rows of the bundle's tasks, shuffled; none longer than `most` characters."""
    texts: list[str] = []
    for task in mm.Bundle(bundle, check=False).tasks:
        rows = read_table(data / task.name / "test.parquet", ["text"])
        texts += [text for row in rows if not isinstance(row, Exception) and len(text := str(row["text"])) <= most]
    random.Random(0).shuffle(texts)
    return texts[:1024]


class Offline:
    """`predict` in this process, a batch after the other."""

    def __init__(self, bundle: Path, texts: list[str]) -> None:
        self._model, self._texts, self._next = mm.load(bundle, check=False), texts, 0
        self.one(texts[:BATCH])

    def one(self, texts: list[str]) -> None:
        """Answer these."""
        self._model.predict(texts, batch_size=BATCH)

    def run(self, seconds: float) -> tuple[float, float]:
        """Answers in a second, and seconds of processor time for an answer."""
        began, worked, count = time.perf_counter(), sum(psutil.Process().cpu_times()[:2]), 0
        while time.perf_counter() - began < seconds:
            self.one([self._texts[(self._next + i) % len(self._texts)] for i in range(BATCH)])
            self._next += BATCH
            count += BATCH
        work = sum(psutil.Process().cpu_times()[:2]) - worked
        return count / (time.perf_counter() - began), work / count


def throughput(served: Served, offline: Offline, texts: list[str], rounds: int, seconds: float) -> list[Row]:
    """Clients of single inputs against `predict` with the same batch size."""
    ratios, works = [], []
    for number in range(rounds):
        rate, work = offline.run(seconds)
        before = served.work
        load = in_own_process("clients", served.url, texts, CLIENTS, seconds)
        served_work = (served.work - before) / load.statuses[200]
        assert set(load.statuses) == {200}, load.statuses
        ratios.append(load.rate / rate)
        works.append(work / served_work)
        print(f"round {number}: predict {rate:.1f}/s, service {load.rate:.1f}/s, ratio {ratios[-1]:.2f}; work of an answer "
              f"{1000 * work:.1f} and {1000 * served_work:.1f} ms, ratio {works[-1]:.2f}", flush=True)  # fmt: skip
    found, work = statistics.median(ratios), statistics.median(works)
    spread = f"{found:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); by work {work:.2f}"
    return [(f"throughput, {CLIENTS} clients of single inputs, against predict", spread, "≥ 0.8", found >= 0.8)]


def latency(served: Served, offline: Offline, texts: list[str], count: int) -> list[Row]:
    """One request at a time against a call of `predict`, in turns."""
    import httpx

    direct, asked, work, before = [], [], 0.0, served.work
    with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as client:
        for number in range(count):
            text = texts[number % len(texts)]
            began, worked = time.perf_counter(), time.process_time()
            offline.one([text])
            work += time.process_time() - worked
            middle = time.perf_counter()
            assert client.post("/v1/predict", json={"inputs": text}).status_code == 200
            direct.append(1000 * (middle - began))
            asked.append(1000 * (time.perf_counter() - middle))
    fast = _fastest(asked) - _fastest(direct)
    median = statistics.median(asked) - statistics.median(direct)
    more = 1000 * (served.work - before - work) / count
    print(f"predict {_fastest(direct):.1f} ms, service {_fastest(asked):.1f} ms, the fastest tenth of each", flush=True)
    shown = f"{median:.1f} ms (medians of {count}); fastest tenths {fast:.1f} ms; by work {more:.1f} ms"
    return [("latency that an idle service adds", shown, "≤ 15 ms", median <= 15)]


def _fastest(times: list[float]) -> float:
    """The time within which a tenth is done: those that other work on the machine disturbed least."""
    return statistics.quantiles(times, n=10)[0]


def overload(served: Served, texts: list[str], seconds: float, peak_seconds: float) -> list[Row]:
    """Four times the capacity: who is answered, who is refused and how fast, and what memory does.

    The peak is measured before and after, so that other work on the machine shows.
    """

    def peak() -> tuple[float, float]:
        """Answers in a second, and processor time for an answer."""
        worked = served.work
        load = in_own_process("clients", served.url, texts, CLIENTS, peak_seconds)
        return load.rate, (served.work - worked) / max(1, load.statuses[200])

    before, work = peak()
    memory, stop = [served.memory], Event()

    def watch() -> None:
        while not stop.wait(1.0):
            memory.append(served.memory)

    thread = Thread(target=watch)
    thread.start()
    worked = served.work
    load: Load = in_own_process("flood", served.url, texts, 4 * before, seconds)
    stop.set()
    thread.join()
    by_work = work / ((served.work - worked) / max(1, load.statuses[200]))
    after, _ = peak()
    share = load.in_time / load.seconds / statistics.mean((before, after))
    print(f"peak {before:.1f}/s before, {after:.1f}/s after; {load.seconds:.0f} s of requests: {dict(load.statuses)}")
    for word, status in (("refused", 503), ("answered", 200)):
        half, most = load.quantile(status, 0.5), load.quantile(status, 0.99)
        print(f"{word}: half of them within {half:.0f} ms, 99 % within {most:.0f} ms")
    print(f"memory {memory[0]:.0f} MB at first, {max(memory):.0f} MB at most", flush=True)
    grown = max(memory) - memory[0]
    return [
        (
            "overload of 4 × capacity: answered, of the peak",
            f"{share:.2f}; by work {by_work:.2f}",
            "≥ 0.8",
            share >= 0.8,
        ),
        (
            "overload: requests neither answered nor refused",
            str(load.statuses[0]),
            "0",
            set(load.statuses) <= {200, 503},
        ),
        ("overload: memory gained", f"{grown:.0f} MB", "≤ 200 MB", grown <= 200),
        ("overload: refusals within", f"{load.quantile(503, 0.99):.0f} ms (99 %)", "at once", True),
    ]


def main() -> None:
    """Run the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["throughput", "latency", "overload"])
    parser.add_argument("--bundle", type=Path, default=SUITE / "bundles" / "core")
    parser.add_argument("--data", type=Path, default=SUITE / "data")
    parser.add_argument("--longest", type=int, default=100_000, help="characters of the texts that are used, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a round, and of the measurement of the peak")
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=100, help="for the latency")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    texts = read_texts(given.bundle, given.data, given.longest)
    rows: list[Row] = []
    with serving(str(given.bundle), "--threads", str(given.threads), "--batch-size", str(BATCH)) as served:
        if "overload" not in given.cases or len(given.cases) > 1:
            offline = Offline(given.bundle, texts)
        if "throughput" in given.cases:
            rows += throughput(served, offline, texts, given.rounds, given.seconds)
        if "latency" in given.cases:
            rows += latency(served, offline, texts, given.requests)
        if "overload" in given.cases:
            rows += overload(served, texts, given.overload_seconds, given.seconds)
    for name, measured, bound, holds in rows:
        print(f"| {name} | {measured} | {bound} | {'holds' if holds else '**missed**'} |")
    sys.exit(0 if all(row[3] for row in rows) else 1)


if __name__ == "__main__":
    main()
