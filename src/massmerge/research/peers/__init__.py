"""Routed peers: methods that keep the experts' updates apart and mix them for each input.

Each is made by `PEERS[name](prepared, inputs, **options)`: from a recipe's sources, as `open_recipe` opens them, and, if it
trains something, unlabelled inputs of each task. A new one is one file and one line here.
"""

from collections.abc import Callable

from massmerge.research.peers.arrow import arrow
from massmerge.research.peers.peer import Inputs, Peer
from massmerge.research.peers.smile import smile_1, smile_2
from massmerge.research.peers.twin import twin
from massmerge.research.peers.wemoe import wemoe

PEERS: dict[str, Callable[..., Peer]] = {
    "smile_1": smile_1,
    "smile_2": smile_2,
    "wemoe": wemoe,
    "twin": twin,
    "arrow": arrow,
}

__all__ = ["PEERS", "Inputs", "Peer"]
