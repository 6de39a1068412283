"""What a task's subspace means, said in texts."""

from massmerge.interpret.decoding import DecodedText, Interpretation, interpret
from massmerge.interpret.textspan import Pick, text_span

__all__ = ["DecodedText", "Interpretation", "Pick", "interpret", "text_span"]
