"""How an input finds its task: activations in, scores out, one file a router; selection is shared."""

from massmerge.routing.activation import Activation
from massmerge.routing.selection import agreements, margins, select, standardize, vote, weigh
from massmerge.routing.sites import Site, choose_sites, find_sites

__all__ = [
    "Activation", "Site", "agreements", "choose_sites", "find_sites", "margins", "select",
    "standardize", "vote", "weigh",
]  # fmt: skip
