"""Where weights come from."""

from massmerge.checkpoints.adapters import AdapterExpert, is_adapter, open_adapter
from massmerge.checkpoints.backbone import Base, narrow, open_base
from massmerge.checkpoints.expert_tensors import ExpertTensor, LowRank
from massmerge.checkpoints.experts import Expert, FullExpert, HeadParts, open_full_expert
from massmerge.checkpoints.sources import PROCESSOR_FILES, Source, find_source

__all__ = [
    "PROCESSOR_FILES", "AdapterExpert", "Base", "Expert", "ExpertTensor", "FullExpert", "HeadParts", "LowRank", "Source",
    "find_source", "is_adapter", "narrow", "open_adapter", "open_base", "open_expert", "open_full_expert",
]  # fmt: skip


def open_expert(source: Source, base: Base) -> Expert:
    """An expert of the base, whatever it is stored as."""
    return open_adapter(source, base) if is_adapter(source) else open_full_expert(source, base)
