"""YAML files that people write, as pydantic models; every error names the line and what is expected."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from massmerge.errors import InputError


class Section(BaseModel):
    """A part of such a file: unknown keys are faults, and nothing is changed once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


_P = TypeVar("_P", bound=Section)
# The parser in C, where PyYAML was built with it: a tenth of the time, which counts when a bundle is loaded.
_QUICK = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_text(path: Path, what: str) -> str:
    """The text of a file; `what` says in messages what it should be, such as `recipe`.

    Raises:
        InputError: it does not exist, or is not a text file.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such {what}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}).") from None


def _loaded(text: str) -> tuple[Any, Any]:
    """The nodes and the values of a text; errors come from the parser in Python, which locates them better."""
    try:
        return yaml.compose(text, Loader=_QUICK), yaml.load(text, Loader=_QUICK)
    except yaml.YAMLError:
        return yaml.compose(text, Loader=yaml.SafeLoader), yaml.load(text, Loader=yaml.SafeLoader)


def parse(model: type[_P], text: str, name: str, what: str) -> _P:
    """A model from YAML text.

    Args:
        model: what the text should describe.
        text: the YAML.
        name: how the text is called in messages, most often its path.
        what: what it should be, such as `recipe`.

    Raises:
        InputError: with every fault in it, a line each.
    """
    try:
        node, data = _loaded(text)
        repeated = _repeated_keys(node, set())
    except RecursionError:
        raise InputError(f"{name}: nested too deeply, or an anchor in it refers to itself.") from None
    except ValueError as error:  # what looks like a date or a number and is none
        raise InputError(f"{name}: contains a value that cannot be read ({error}). Write it in quotes.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise InputError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(data, dict):
        needed = [key for key, field in model.model_fields.items() if field.is_required()]
        keys = f"the keys {' and '.join(needed)}" if len(needed) > 1 else f"the key {needed[0]}"
        raise InputError(f"{name}: a {what} is a mapping with {keys}.")
    faults = [f"{name}:{line}: the key {key!r} occurs twice" for key, line in repeated]
    try:
        found = model.model_validate(data)
    except ValidationError as error:
        raise InputError("\n".join([*faults, *_faults(model, name, what, node, data, error)])) from None
    if faults:
        raise InputError("\n".join(faults))
    return found


def _faults(
    model: type[Section], name: str, what: str, node: yaml.Node | None, data: Any, error: ValidationError
) -> list[str]:
    """Every fault in the file's own words: line, key, what is wrong, what would be right."""
    found: dict[tuple[str | int, ...], list[Any]] = {}
    for one in error.errors():
        found.setdefault(_path_in(data, one["loc"], missing=one["type"] == "missing"), []).append(one)
    # Where a value may be of several kinds, the kind that failed further inside is the one that was meant.
    meant = [path for path in found if not any(len(p) > len(path) and p[: len(path)] == path for p in found)]
    return [f"{name}:{_line(node, path)}: {_fault(model, what, path, found[path])}" for path in meant]


def _path_in(data: Any, location: Sequence[str | int], *, missing: bool) -> tuple[str | int, ...]:
    """The keys among the parts of an error's location; the others name the alternatives that were tried."""
    path: list[str | int] = []
    for part in location:
        if (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            path, data = [*path, part], data[part]  # type: ignore[index]
    return (*path, location[-1]) if missing else tuple(path)


def _fault(model: type[Section], what: str, path: Sequence[str | int], errors: Sequence[Any]) -> str:
    key, kind, given = ".".join(str(p) for p in path) or what, errors[0]["type"], errors[0]["input"]
    if kind == "extra_forbidden":
        return f"unknown key {key!r} (known here: {', '.join(_known_keys(model, path[:-1]))})"
    if kind == "missing":
        return f"{key!r} is missing"
    if any(error["type"] == "too_short" for error in errors):
        return f"{key!r} is empty; give at least one"
    messages = (e["msg"].removeprefix("Value error, ").removeprefix("Input ") for e in errors)
    words = " or ".join(dict.fromkeys(messages)).replace(" or should be ", " or ")
    words = re.sub(r"a valid dictionary or instance of \w+", "a mapping of keys to values", words)
    if kind == "string_type" and isinstance(given, int | float):
        words += "; write it in quotes"
    shown = "" if isinstance(given, dict | list) or repr(given) in words else f" (it is {given!r})"
    return f"{key!r}: {words}{shown}"


def _known_keys(model: type[Section], path: Sequence[str | int]) -> list[str]:
    """Keys of the part of the file at that path."""
    kinds: list[Any] = [model]
    for part in path:
        kinds = [inner for kind in kinds for inner in _inside(kind, part)]
    return list(
        dict.fromkeys(key for kind in kinds for one in _plain(kind) for key in getattr(one, "model_fields", ()))
    )


def _inside(kind: Any, part: str | int) -> Iterator[Any]:
    """The kinds of value that may stand at a key of a value of some kind."""
    for one in _plain(kind):
        if get_origin(one) in (dict, list):
            yield get_args(one)[-1]
        elif isinstance(one, type) and issubclass(one, BaseModel) and part in one.model_fields:
            yield one.model_fields[str(part)].annotation


def _plain(kind: Any) -> Iterator[Any]:
    """The alternatives of a union, without their annotations."""
    if get_origin(kind) is Annotated:
        yield from _plain(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _plain(one)
    else:
        yield kind


def _line(node: yaml.Node | None, path: Sequence[str | int]) -> int:
    """The line (from 1) of the last part of a path that stands in the text."""
    line = 1
    for key in path:
        if isinstance(node, yaml.MappingNode):
            pair = next(((k, v) for k, v in node.value if k.value == str(key)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _repeated_keys(node: yaml.Node | None, visited: set[int]) -> list[tuple[str, int]]:
    """Keys that a mapping has twice; YAML's reader would keep the last without a word.

    What anchors refer to is looked at once: a few lines of them can stand for billions of nodes.
    """
    found: list[tuple[str, int]] = []
    if id(node) in visited:
        return found
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                found.append((key.value, key.start_mark.line + 1))
            seen.add(key.value)
            found += _repeated_keys(value, visited)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            found += _repeated_keys(value, visited)
    return found
