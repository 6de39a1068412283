"""What turns the backbone's output into logits over one task's labels."""

from massmerge.merging.heads.head import HeadSource
from massmerge.merging.heads.sources import find_base_head, find_further_heads, find_head, write_head

__all__ = ["HeadSource", "find_base_head", "find_further_heads", "find_head", "write_head"]
