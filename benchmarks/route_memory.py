"""Resident memory of what only routes, without a service around it: `python benchmarks/route_memory.py BUNDLE [--mapped]`.

Any bundle of a decoder will do; prompts are random tokens. Prints the memory of the process after the imports, after loading
and after some prompts.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import torch

from massmerge.io.allocator import keep_buffers
from massmerge.model.load import load_routing


def resident() -> float:
    """Megabytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> None:
    """Load, route, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--mapped", action="store_true", help="leave tensors in the file")
    parser.add_argument("--prompts", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_buffers()
    imports = resident()
    model = load_routing(options.bundle, mapped=options.mapped, check=False)
    loaded = resident()
    draw = torch.Generator().manual_seed(0)
    for _ in range(options.prompts):
        model.route([{"input_ids": torch.randint(3, model.core.base.config.vocab_size, (40,), generator=draw)}])
    print(f"imports {imports:.0f} MB, loaded {loaded:.0f} MB, after {options.prompts} prompts {resident():.0f} MB")


if __name__ == "__main__":
    main()
