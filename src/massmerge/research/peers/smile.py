"""SMILE: each token takes, in each linear layer, the low-rank update of the one expert whose subspace holds most of it."""

from __future__ import annotations

from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.research.peers.peer import Inputs, Peer
from massmerge.research.peers.tokens import TokenRoutedPeer


def smile_1(
    prepared: OpenedRecipe,
    inputs: Inputs | None = None,
    *,
    gate: int = 16,
    rank: int = 32,
    average_others: bool = False,
) -> Peer:
    """SMILE with updates of rank 32.

    Args:
        prepared: a recipe's sources.
        inputs: not needed; all peers are called alike.
        gate: right singular vectors that a token is compared with.
        rank: of the updates.
        average_others: whether norms, embeddings and the like are the mean over the experts; the base's by default.
    """
    return TokenRoutedPeer(prepared, "smile", gate=gate, rank=rank, average_others=average_others)


def smile_2(
    prepared: OpenedRecipe,
    inputs: Inputs | None = None,
    *,
    gate: int = 16,
    rank: int = 128,
    average_others: bool = False,
) -> Peer:
    """SMILE with updates of rank 128, else as `smile_1`."""
    return smile_1(prepared, inputs, gate=gate, rank=rank, average_others=average_others)
