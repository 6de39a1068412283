"""What a bundle keeps of the inputs that its router was fitted on; it stays when tasks are added or removed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from massmerge.bundle.layout import ROUTER
from massmerge.bundle.reader import Bundle
from massmerge.io.tensor_file import read_header, read_tensor
from massmerge.routing.moments import of_tasks

MOMENTS = "moments"
"""Stands before the names of these tensors, as a router's kind does before its own; then comes the place of the look."""


def kept_moments(bundle: Bundle) -> dict[str, dict[str, Tensor]]:
    """Moments of the inputs of the bundle's first tasks, by the place of each look; none where nothing was kept."""
    found: dict[str, dict[str, Tensor]] = {}
    if ROUTER in bundle.manifest["files"]:
        for name, info in read_header(bundle.file(ROUTER)).items():
            if name.startswith(f"{MOMENTS}."):
                place, _, part = name.removeprefix(f"{MOMENTS}.").rpartition(".")
                found.setdefault(place, {})[part] = read_tensor(info)
    return found


def tasks_kept(bundle: Bundle) -> int:
    """Of how many tasks, the bundle's first, moments are kept."""
    return min((len(kept["means"]) for kept in kept_moments(bundle).values()), default=0)


def moment_tensors(moments: dict[str, dict[str, Tensor]], tasks: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Moments under the names that they have in a bundle's file; of some tasks, or all.

    Args:
        moments: by the place of each look.
        tasks: positions of the tasks that stay; those of which nothing is kept are passed over.
    """
    return {
        f"{MOMENTS}.{place}.{name}": tensor.contiguous()
        for place, kept in moments.items()
        for name, tensor in (
            kept if tasks is None else of_tasks(kept, [t for t in tasks if t < len(kept["means"])])
        ).items()
    }
