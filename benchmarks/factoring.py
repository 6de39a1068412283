"""Factoring and fixed merge against full SVDs: time and error, on matrices the size of ViT-B/32.

    python benchmarks/factoring.py --tasks 8 20 --blocks 2

Both sides get the same deltas in the same process, one matrix after the other, so that a busy machine slows both. The
naive side is the usual TSV-M: a full float32 SVD of each delta, two more of the concatenated bases. "Equal" runs both
with torch's default threads, scipy's BLAS held to one; "workers" runs ours as `mass merge` does, whole matrices on two
threads of one BLAS thread each, against the naive side with default threads. Errors are against the same algorithm in
float64.

Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from massmerge.linalg.factors import Factors, truncated_svd, tsv_merge

WIDTH = 768
# One transformer block: query, key, value, output, and the two MLP matrices.
BLOCK = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
# Experts' deltas are as small as this per entry; a random matrix is the hardest spectrum to cut, as it has no gap.
ENTRY = 1e-3
WORKERS = 2
MAX_ERROR = 1e-4
# Speed at equal threads, by number of tasks from which the bound holds.
MIN_RATIO = {8: 2.0, 20: 3.0}


def gaussian(m: int, n: int, seed: int) -> Tensor:
    """Independent entries: a flat spectrum."""
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)) * ENTRY


def decaying(m: int, n: int, seed: int) -> Tensor:
    """Singular values that fall as 1/i between random bases, as those of fine-tuned weights do."""
    left, _ = torch.linalg.qr(gaussian(m, min(m, n), 2 * seed))
    right, _ = torch.linalg.qr(gaussian(n, min(m, n), 2 * seed + 1))
    return (left / torch.arange(1, min(m, n) + 1)) @ right.mT


SPECTRA: dict[str, Callable[[int, int, int], Tensor]] = {"gaussian": gaussian, "decaying": decaying}
RANKS: dict[str, Callable[[int, int, int], int]] = {
    "1/T": lambda m, n, tasks: min(m, n) // tasks,
    "budget": lambda m, n, tasks: m * n // ((m + n + 1) * tasks),
}


def full_svd(a: Tensor, k: int) -> Factors:
    """The naive factors: everything is computed, k triplets are kept."""
    u, s, v = torch.linalg.svd(a, full_matrices=False)
    return Factors(u[:, :k], s[:k], v[:k])


def full_svd_merge(tasks: Sequence[Factors]) -> Tensor:
    """TSV-M by full SVDs of both concatenated bases."""
    p, _, q = torch.linalg.svd(torch.cat([f.u for f in tasks], 1), full_matrices=False)
    r, _, w = torch.linalg.svd(torch.cat([f.v for f in tasks], 0), full_matrices=False)
    return ((p @ q) * torch.cat([f.s for f in tasks])) @ (r @ w)


def naive(deltas: Sequence[Tensor], k: int) -> Tensor:
    """The fixed merge of one matrix by full SVDs, in the dtype of the deltas."""
    return full_svd_merge([full_svd(delta, k) for delta in deltas])


def ours(deltas: Sequence[Tensor], k: int) -> Tensor:
    """The fixed merge of one matrix by the library."""
    return tsv_merge([truncated_svd(delta, k) for delta in deltas])


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = perf_counter()
    run()
    return perf_counter() - start


def workers_seconds(jobs: Sequence[tuple[list[Tensor], int]]) -> float:
    """Wall time of `ours` over whole matrices, largest first, on two single-threaded workers."""
    ordered = sorted(jobs, key=lambda job: -job[0][0].numel())
    # The BLAS limit belongs to the process and is set in `main`; torch's belongs to each thread.
    with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return seconds(lambda: list(pool.map(lambda job: ours(*job), ordered)))


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius distance as a share of the norm."""
    return float((got.double() - want).norm() / want.norm())


def errors(deltas: list[Tensor], k: int) -> dict[str, float]:
    """Errors against float64: of the rank-k product, of our merge and of the naive float32 one."""
    exact = [delta.double() for delta in deltas]
    merged = naive(exact, k)
    return {
        "product_error": relative_error(truncated_svd(deltas[0], k).dense(), full_svd(exact[0], k).dense()),
        "merge_error": relative_error(ours(deltas, k), merged),
        "naive_merge_error": relative_error(naive(deltas, k), merged),
    }


def measure(spectrum: str, rank: str, tasks: int, blocks: int, repeats: int) -> dict[str, Any]:
    """One line of the table: times summed over the blocks, ratios as medians over the repeats."""
    worst: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [0.0] * repeats for name in ("naive", "ours", "workers")}
    for block in range(blocks):
        jobs = []
        for i, (m, n) in enumerate(BLOCK):
            first = (block * len(BLOCK) + i) * tasks
            deltas = [SPECTRA[spectrum](m, n, first + t) for t in range(tasks)]
            jobs.append((deltas, RANKS[rank](m, n, tasks)))
        for job in jobs[3:] if block == 0 else []:  # one matrix of each shape
            worst = {name: max(value, worst.get(name, 0.0)) for name, value in errors(*job).items()}
        for repeat in range(repeats):
            for job in jobs:
                times["naive"][repeat] += seconds(lambda job=job: naive(*job))
                times["ours"][repeat] += seconds(lambda job=job: ours(*job))
            times["workers"][repeat] += workers_seconds(jobs)
    return {
        "spectrum": spectrum,
        "rank": rank,
        "tasks": tasks,
        "blocks": blocks,
        "seconds": {name: median(values) for name, values in times.items()},
        "ratio": median(a / b for a, b in zip(times["naive"], times["ours"], strict=True)),
        "workers_ratio": median(a / b for a, b in zip(times["naive"], times["workers"], strict=True)),
        **worst,
    }


def missed(row: dict[str, Any]) -> list[str]:
    """The bounds this line misses, in words."""
    wanted = max((ratio for tasks, ratio in MIN_RATIO.items() if row["tasks"] >= tasks), default=0.0)
    where = f"{row['spectrum']}, {row['rank']}, {row['tasks']} tasks"
    found = [f"{where}: {row['ratio']:.2f} times faster, not {wanted}"] if row["ratio"] < wanted else []
    for name in ("product_error", "merge_error"):
        if not row[name] <= MAX_ERROR:
            found.append(f"{where}: {name} {row[name]:.1e} is above {MAX_ERROR:.0e}")
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", default=[8, 20])
    parser.add_argument("--rank", choices=RANKS, nargs="+", default=list(RANKS))
    parser.add_argument("--spectrum", choices=SPECTRA, nargs="+", default=list(SPECTRA))
    parser.add_argument("--blocks", type=int, default=2, help="of ViT-B/32's 12; they are alike")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    return parser.parse_args()


def main() -> int:
    """Measures every combination asked for; 1 if one misses a bound."""
    args = arguments()
    # Only ours calls scipy. Its pool, if it has more than one thread, spins on the cores that torch's pool needs.
    threadpool_limits(1, user_api="blas")
    rows = []
    if not args.json:
        print(f"{torch.get_num_threads()} threads, {args.blocks} blocks, median of {args.repeats}")
        print(f"{'':32}|{'seconds':^26}|{'ratio':^17}|{'relative error':^28}")
        print(
            f"{'spectrum':>10}{'rank':>8}{'tasks':>7}{'':7}|{'naive':>8}{'ours':>8}{'workers':>9} |"
            f"{'equal':>7}{'workers':>9} |{'product':>9}{'merge':>9}{'naive':>9}"
        )
    for spectrum in args.spectrum:
        for rank in args.rank:
            for tasks in args.tasks:
                row = measure(spectrum, rank, tasks, args.blocks, args.repeats)
                rows.append(row)
                if not args.json:
                    took = row["seconds"]
                    print(
                        f"{spectrum:>10}{rank:>8}{tasks:>7}{'':7}|"
                        f"{took['naive']:8.2f}{took['ours']:8.2f}{took['workers']:9.2f} |"
                        f"{row['ratio']:7.2f}{row['workers_ratio']:9.2f} |"
                        f"{row['product_error']:9.1e}{row['merge_error']:9.1e}{row['naive_merge_error']:9.1e}",
                        flush=True,
                    )
    failures = [line for row in rows for line in missed(row)]
    if args.json:
        print(json.dumps({"threads": torch.get_num_threads(), "rows": rows, "missed": failures}, indent=2))
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
