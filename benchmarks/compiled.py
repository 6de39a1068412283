"""What `torch.compile` would do for a base on the CPU: `python benchmarks/compiled.py`.

A ViT-B/32 with random weights as it is and compiled, in turns: seconds of the first call with inputs of one size, which
compiles, and of later ones. On a GPU (`--device cuda`) the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import CLIPVisionModel

from vit_b32 import make_base

BATCHES = (1, 64)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, to the end of what it started."""
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.inference_mode()
def main() -> None:
    """Print one line for each size of a batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu", type=torch.device)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = CLIPVisionModel.from_pretrained(make_base(Path(folder))).eval().to(options.device)
    for size in BATCHES:
        x = torch.randn(size, 3, 224, 224, device=options.device)
        compiled = torch.compile(plain, dynamic=False)
        first = seconds(partial(compiled, pixel_values=x), options.device)
        plain(pixel_values=x)
        times = [
            [seconds(partial(model, pixel_values=x), options.device) for model in (plain, compiled)]
            for _ in range(options.repeats)
        ]
        one, other = (statistics.median(side) for side in zip(*times, strict=True))
        print(
            f"batch of {size}: plain {one:.3f} s, compiled {other:.3f} s ({other / one:.2f}), first call {first:.1f} s"
        )


if __name__ == "__main__":
    main()
