"""Arrow: an expert's prototype in a layer is the first right singular vector of its delta; tokens go where they point."""

from __future__ import annotations

from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.research.peers.peer import Inputs, Peer
from massmerge.research.peers.tokens import TokenRoutedPeer


def arrow(
    prepared: OpenedRecipe,
    inputs: Inputs | None = None,
    *,
    rank: int = 32,
    top_k: int = 3,
    temperature: float = 1.0,
) -> Peer:
    """Per token and layer, the `top_k` experts of the largest `|v·x|`, mixed by the softmax of it.

    Args:
        prepared: a recipe's sources.
        inputs: not needed; all peers are called alike.
        rank: of the updates; an adapter of a lower rank keeps its own. Arrow was made for adapters, which have one.
        top_k: experts that a token is sent to.
        temperature: that `|v·x|` is divided by before the softmax.
    """
    return TokenRoutedPeer(prepared, "arrow", gate=1, rank=rank, top_k=top_k, temperature=temperature)
