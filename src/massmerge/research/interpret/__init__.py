"""What a task's subspace means, said in texts."""

from massmerge.research.interpret.decoding import DecodedText, Interpretation, interpret
from massmerge.research.interpret.textspan import Pick, text_span

__all__ = ["DecodedText", "Interpretation", "Pick", "interpret", "text_span"]
