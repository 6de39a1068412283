"""Models of sentence-transformers: what follows the backbone, and so what a head reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from massmerge.checkpoints.sentence_folder import MODULES, read_modules
from massmerge.checkpoints.sources import Source
from massmerge.checkpoints.stores import Store, open_folder
from massmerge.errors import InputError

_POOLINGS = {"cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean"}
_ACTIVATIONS = {
    "identity": "none",
    "relu": "relu",
    "gelu": "gelu",
    "tanh": "tanh",
    "silu": "silu",
    "sigmoid": "sigmoid",
}


@dataclass(frozen=True)
class Dense:
    """A linear layer on the pooled output."""

    store: Store
    activation: str
    normalize: bool = False
    """Whether its output is scaled to length 1."""


@dataclass(frozen=True)
class Sentence:
    """What follows the backbone."""

    features: str
    """The pooling, as `features:` of a head names it."""
    normalize: bool = False
    """Whether the pooled output is scaled to length 1."""
    dense: tuple[Dense, ...] = ()


class _Unsupported(InputError):
    """A module that heads cannot read through."""


def find_sentence(source: Source) -> Sentence | None:
    """What follows a backbone; none if it is not of sentence-transformers.

    Raises:
        InputError: a head cannot read what these modules compute.
    """
    path = source.around(MODULES)
    if path is None:
        return None
    found: Sentence | None = None
    try:
        for kind, place in read_modules(path)[1:]:
            found = _after(found, kind, source, place)
    except _Unsupported as error:
        raise InputError(
            f"{path}: {error} Give `features:` with the head, and in the head all layers behind the pooling."
        ) from None
    return found


def _after(found: Sentence | None, kind: str, source: Source, place: str) -> Sentence:
    """What one more module makes of it."""
    if kind == "Pooling":
        return Sentence(_pooling(source.around_json(f"{place}/config.json")))
    if found is None:
        raise _Unsupported(f"a {kind} stands before the pooling.")
    if kind == "Normalize":
        last = found.dense[-1:]
        if not last:
            return replace(found, normalize=True)
        return replace(found, dense=(*found.dense[:-1], replace(last[0], normalize=True)))
    if kind == "Dense":
        config, folder = source.around_json(f"{place}/config.json"), source.around(f"{place}/config.json")
        name = str(config.get("activation_function", "tanh")).rpartition(".")[2].lower()
        if name not in _ACTIVATIONS or folder is None:
            raise _Unsupported(f"the activation {name!r} of {place} is not supported.")
        return replace(found, dense=(*found.dense, Dense(open_folder(folder.parent), _ACTIVATIONS[name])))
    if kind == "Dropout":  # which does nothing when a model answers
        return found
    raise _Unsupported(f"a {kind} follows the pooling, which is not supported.")


def _pooling(config: dict[str, Any]) -> str:
    """The pooling's name in a recipe; older files have a switch for each kind, newer ones a word."""
    said = config.get("pooling_mode")
    modes = [said] if isinstance(said, str) else said if isinstance(said, list) else None
    if modes is None:
        modes = [k.removeprefix("pooling_mode_") for k, on in config.items() if k.startswith("pooling_mode_") and on]
    if len(modes) != 1 or str(modes[0]) not in _POOLINGS:
        raise _Unsupported(f"its pooling is {' and '.join(map(str, modes)) or 'not said'}; supported: mean, cls.")
    return _POOLINGS[str(modes[0])]
