"""Static merges: all tasks of one matrix to one delta. A new one is one file and one line here."""

from collections.abc import Callable, Sequence

from torch import Tensor

from massmerge.linalg import Factors, tsv_merge

STATIC_METHODS: dict[str, Callable[[Sequence[Factors]], Tensor]] = {"tsv_m": tsv_merge}
