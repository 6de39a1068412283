"""Which of the base's tensors an expert really changes: one look at the weights, before ranks are shared out.

A full checkpoint holds the whole backbone, and fine-tuning often leaves its largest matrix, the word embedding, as it was.
Ranks reserved for that would be a part of the budget that nobody uses.
"""

from __future__ import annotations

from torch import Tensor

from massmerge.checkpoints import Base, Expert
from massmerge.checkpoints.experts import FullExpert
from massmerge.checkpoints.stores import SafetensorsStore
from massmerge.io.tensor_file import read_start
from massmerge.merging.deltas import delta


def weights_at_hand(base: Base, expert: Expert) -> bool:
    """Whether both are on this machine; of a hub repository that was not downloaded only headers are known."""
    return base.source.path is not None and expert.source.path is not None


def changed_by(base: Base, expert: Expert) -> set[str]:
    """The tensors that an expert changes, and those that it adds to the base.

    Most that it changes differ in their first bytes already, so little more is read than what it leaves alone.
    """
    return {name for name in expert.names() if _changes(base, expert, name)}


def _changes(base: Base, expert: Expert, name: str) -> bool:
    if name not in base.readings or expert.rank_limit(name) is not None or _starts_differ(base, expert, name):
        return True
    ours, theirs = base.read(name), expert.read(name)
    assert isinstance(theirs, Tensor), f"the rank of {name} is known"
    return not ours.equal(theirs) if ours.dtype == theirs.dtype else bool(delta(ours, theirs).any())


def _starts_differ(base: Base, expert: Expert, name: str) -> bool:
    """Whether the first bytes differ of a tensor that both files store as it is."""
    if not isinstance(expert, FullExpert) or not isinstance(base.store, SafetensorsStore):
        return False
    one, other = base.readings[name], expert.readings[name]
    plain = one.converter is None and other.converter is None and isinstance(expert.store, SafetensorsStore)
    return plain and one.info.dtype == other.info.dtype and read_start(one.info) != read_start(other.info)
