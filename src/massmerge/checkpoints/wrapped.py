"""State dicts of models that others built around the backbone: a prefix before its names, other layers beside it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from massmerge.checkpoints.skeleton import Skeleton
from massmerge.checkpoints.stores import Store
from massmerge.io.tensor_file import TensorInfo

_DEPTH = 4  # modules that a backbone may be wrapped in


class PartStore:
    """The tensors of a store under one prefix, named without it."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self.infos: Mapping[str, TensorInfo] = {
            name.removeprefix(prefix): info for name, info in store.infos.items() if name.startswith(prefix)
        }

    def read(self, name: str) -> Tensor:
        """The tensor of that name."""
        return self._store.read(self._prefix + name)

    def start(self, name: str, skip: int = 0) -> bytes | None:
        """The first bytes of a tensor."""
        return self._store.start(self._prefix + name, skip)


def backbone_prefix(infos: Mapping[str, TensorInfo], backbone: Skeleton) -> str:
    """What a file puts before the names of a backbone's tensors; empty where transformers knows the names as they are.

    The shortest prefix under which most of the backbone is found, so that a task's model stays whole inside its wrapper.
    """
    best, found = "", _known(infos, "", backbone)
    if found >= len(backbone.slots):
        return best
    prefixes = {name[: at + 1] for name in infos for at in _dots(name)}
    for prefix in sorted(prefixes, key=lambda p: (p.count("."), p)):
        count = _known(infos, prefix, backbone)
        if count > found:
            best, found = prefix, count
    return best


def _dots(name: str) -> list[int]:
    """Where the first modules of a path end; numbers name blocks, in which no whole backbone lies."""
    ends, at = [], -1
    for part in name.split(".")[:-1][:_DEPTH]:
        at += len(part) + 1
        if part.isdigit():
            break
        ends.append(at)
    return ends


def _known(infos: Mapping[str, TensorInfo], prefix: str, backbone: Skeleton) -> int:
    """How many of a backbone's tensors stand under a prefix."""
    names = [name.removeprefix(prefix) for name in infos if name.startswith(prefix)]
    return len({backbone.canonical.get(target) for target, _ in backbone.rename(names).values()} - {None})
