"""Time of a linear layer's product on the CPU, by the type of its numbers: `python benchmarks/product_types.py`.

In bfloat16, in float16, and with weights that are stored in bfloat16 and widened for each product, as shares of float32.
Processor time of one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import linear

SHAPES = ((768, 768), (3072, 768), (2048, 2048), (8192, 2048))
ROWS = (1, 8, 64, 512)


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Mean processor time of a run; one more comes before."""
    run()
    began = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - began) / repeats


@torch.inference_mode()
def main() -> None:
    """Print one line for each shape and number of rows."""
    torch.set_num_threads(1)
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
