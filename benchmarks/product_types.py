"""Time of a linear layer's product on the CPU, by the type of its numbers: `python benchmarks/product_types.py`.

In bfloat16, in float16, and with weights that are stored in bfloat16 and widened for each product, as shares of float32.
Then the low-rank update of a task with factors that stay in int8 and are decoded within each product, as a share of factors
that were decoded once. Processor time of one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import linear

from massmerge.bundle.encoding import decode, encode
from massmerge.linalg.factors import Factors

SHAPES = ((768, 768), (3072, 768), (2048, 2048), (8192, 2048))
ROWS = (1, 8, 64, 512)
RANKS = (16, 48)


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Mean processor time of a run; one more comes before."""
    run()
    began = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - began) / repeats


def update(x: Tensor, factors: Factors) -> Tensor:
    """What a task adds (rows, m) to the outputs for `x (rows, n)`."""
    return (x @ factors.v.mT * factors.s) @ factors.u.mT


def low_rank() -> None:
    """Print one line for each shape, rank and number of rows."""
    for (m, n), k in product(SHAPES, RANKS):
        parts = encode(Factors(torch.randn(m, k), torch.rand(k), torch.randn(k, n)), torch.int8)
        once = decode(parts)
        shares = []
        for rows in ROWS:
            x = torch.randn(rows, n)
            repeats = max(5, int(3e8 / ((m + n) * k * (rows + 8))))
            plain = seconds(partial(update, x, once), repeats)
            shares.append(f"{rows} rows {seconds(lambda x=x, p=parts: update(x, decode(p)), repeats) / plain:.2f}")
        print(f"{m}×{n}, rank {k}, decoded within the product:", *shares, flush=True)


@torch.inference_mode()
def main() -> None:
    """Print one line for each shape and number of rows."""
    torch.set_num_threads(1)
    low_rank()
    for m, n in SHAPES:
        wide = torch.randn(m, n)
        brain, half = wide.bfloat16(), wide.half()
        for rows in ROWS:
            x = torch.randn(rows, n)
            repeats = max(3, int(3e8 / (m * n * (rows + 8))))
            plain = seconds(partial(linear, x, wide), repeats)
            sides = {
                "bfloat16": partial(linear, x.bfloat16(), brain),
                "float16": partial(linear, x.half(), half),
                "widened": lambda x=x, w=brain: linear(x, w.float()),
            }
            shares = {name: seconds(run, repeats) / plain for name, run in sides.items()}
            print(f"{m}×{n}, {rows} rows: float32 {1000 * plain:.3f} ms", *(f"{k} {v:.2f}" for k, v in shares.items()))


if __name__ == "__main__":
    main()
