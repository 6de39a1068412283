"""What passes cost: products counted, and processor time measured in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, mm_flop, sdpa_flop_count

_Run = Callable[[], object]


def _product(_: Any, a: Any, b: Any, out_shape: Any = None, **__: Any) -> int:
    """Operations of a product that is added to something in place."""
    return int(mm_flop(a, b))


def _onednn_product(x: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Operations of a product with a weight (out, in) that may be packed."""
    return int(mm_flop(x, (weight[1], weight[0])))


def _attention(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Operations of the attention that a CPU runs."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


# What torch does not count by itself.
_MORE = {
    torch.ops.aten.addmm_: _product,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
}
if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    _MORE[torch.ops.mkldnn._linear_pointwise] = _onednn_product  # what packed layers run


def operations(run: _Run) -> int:
    """Multiplications and additions of all matrix products and convolutions of a call, in this thread alone."""
    with FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
        run()
    return int(counter.get_total_flops())


def time_ratios(runs: Mapping[str, _Run], of: str, repeats: int = 5) -> dict[str, float]:
    """Processor time of calls as multiples of one of them, measured in turns.

    Each round runs all of them once, so that whatever else the machine does meets them alike; the figure is the median over
    the rounds. Time that other processes take is not counted.

    Args:
        runs: the calls by name.
        of: the name of the call that the others are divided by.
        repeats: rounds; one more comes before them and is not counted.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats + 1):
        spent = {}
        for name, run in runs.items():
            began = time.process_time()
            run()
            spent[name] = time.process_time() - began
        if number:
            for name, seconds in spent.items():
                found[name].append(seconds / spent[of])
    return {name: statistics.median(ratios) for name, ratios in found.items()}
