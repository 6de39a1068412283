"""Decoders write for many prompts at once: a mixed batch is one batch, and prompts join and leave it between steps."""

from massmerge.model.decode.decoder import StepDecoder
from massmerge.model.decode.pieces import Piece
from massmerge.model.decode.prompt import Prompt

__all__ = ["Piece", "Prompt", "StepDecoder"]
