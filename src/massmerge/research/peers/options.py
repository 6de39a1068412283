"""Options of routed peers as a command gives them: `smile_1.rank=16`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from massmerge.errors import InputError
from massmerge.research.peers import PEERS

PeerOptions = dict[str, dict[str, Any]]
"""By peer and option a value."""


def parse_options(texts: Iterable[str]) -> PeerOptions:
    """Options by peer, from texts `PEER.OPTION=VALUE`.

    Raises:
        InputError: no such peer, no such option of it, or a value that it cannot have.
    """
    found: PeerOptions = {}
    for text in texts:
        name, _, value = text.partition("=")
        peer, _, option = name.partition(".")
        if peer not in PEERS:
            raise InputError(f"{text!r}: no peer {peer!r}. Write PEER.OPTION=VALUE; choose from {', '.join(PEERS)}.")
        known = _defaults(peer)
        if option not in known:
            raise InputError(f"{text!r}: {peer} has no option {option!r}. Choose from {', '.join(known)}.")
        found.setdefault(peer, {})[option] = _value(text, value, known[option])
    return found


def _defaults(peer: str) -> dict[str, Any]:
    """The options of a peer that can be written as text, with their defaults."""
    given: dict[str, Any] = PEERS[peer].__kwdefaults__ or {}
    return {name: value for name, value in given.items() if isinstance(value, bool | int | float)}


def _value(text: str, value: str, default: Any) -> Any:
    """A text as a value of the default's kind; numbers of peers are never negative."""
    if isinstance(default, bool):
        if value not in ("true", "false"):
            raise InputError(f"{text!r}: true or false is wanted.")
        return value == "true"
    kind = type(default)
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or not 0 <= number < float("inf"):
        raise InputError(f"{text!r}: {'a whole number' if kind is int else 'a number'} from 0 on is wanted.")
    return number
