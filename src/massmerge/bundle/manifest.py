"""The manifest of a bundle, `mass.json`: size and checksums of every file. Reading it does not import transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from massmerge.bundle.layout import (
    CARD,
    FIRST_FORMAT,
    FORMAT_VERSION,
    LAYERED_FORMAT,
    LINEAR,
    LOADED,
    MANIFEST,
    MOVED,
    SHARDED_FORMAT,
    holds_tensors,
    work_folder,
)
from massmerge.bundle.schema import manifest_fault
from massmerge.errors import InputError
from massmerge.io.checksums import file_sha256, xxh128_of
from massmerge.io.durable import write_text
from massmerge.io.json_file import read_json
from massmerge.io.links import hub_blobs, stays_inside
from massmerge.io.shards import INDEX, WEIGHTS
from massmerge.io.tensor_file import read_header
from massmerge.io.untrusted import CONFIGS, refuse_code

_MANIFEST_LIMIT = 100_000_000  # bytes
FileEntry = dict[str, int | str]
"""Size and checksums of a file."""


def write_manifest(folder: Path, data: dict[str, Any], known: Mapping[str, FileEntry] | None = None) -> None:
    """Write the manifest of a complete folder, with size and checksums of every file in it.

    Args:
        folder: the folder.
        data: what else the manifest says.
        known: what is known of some of its files already.
    """
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    names = {p.relative_to(folder).as_posix(): p for p in paths}
    given = known or {}
    files = {name: given[name] if name in given else file_entry(path, name) for name, path in names.items()}
    least = LAYERED_FORMAT if any(map(_layered, paths)) else FIRST_FORMAT
    least = SHARDED_FORMAT if any(path.name == f"{WEIGHTS}{INDEX}" for path in paths) else least
    data = {**data, "format_version": max(least, data.get("format_version", least))}
    sign_manifest(folder, {**data, "files": files})


def _layered(path: Path) -> bool:
    """Whether a file describes a head of several layers."""
    return path.name == LINEAR and "layers" in read_json(path)


def file_entry(path: Path, name: str) -> FileEntry:
    """What a manifest says of a file, which is called `name` in it."""
    entry: FileEntry = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    if holds_tensors(name):
        with path.open("rb") as file:
            entry["xxh128"] = xxh128_of(file)
    return entry


def sign_manifest(folder: Path, data: dict[str, Any]) -> None:
    """Write a manifest as it is given, with a checksum of its own; the one before stays until the new one is whole."""
    text = json.dumps({**data, "sha256": _manifest_sha256(data)}, ensure_ascii=False)
    write_text(folder / MANIFEST, text + "\n")


def _manifest_sha256(data: dict[str, Any]) -> str:
    """Checksum of what a manifest says, whatever the order of its keys."""
    rest = {key: value for key, value in data.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that `mass merge` wrote.

    Raises:
        InputError: there is none, it is damaged, of a newer version, or names files outside of the folder.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        moved = work_folder(folder) / MOVED
        if moved.is_dir():
            raise InputError(
                f"{folder}: the command that was replacing it was interrupted; the previous bundle is in "
                f"{moved}. Run that command again."
            )
        raise InputError(f"{folder}: no such folder.")
    if not path.is_file():
        raise InputError(
            f"{folder}: not a bundle (no {MANIFEST} in it). `mass merge recipe.yaml {folder}` creates one."
        )
    try:
        if path.stat().st_size > _MANIFEST_LIMIT:
            raise ValueError(f"{path.stat().st_size} bytes long")
        data = read_json(path)
        version = data["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error!r}). Merge again, or copy the bundle again.") from None
    if not isinstance(version, int) or version > FORMAT_VERSION or version < 1:
        raise InputError(
            f"{path}: has format version {version}, this massmerge reads up to {FORMAT_VERSION}. "
            "`pip install -U massmerge` gets a newer one."
        )
    if data.get("sha256") != _manifest_sha256(data):
        raise InputError(f"{path}: its bytes have changed (SHA-256 differs). Merge again, or copy the bundle again.")
    files = data.get("files")
    root = folder.resolve()
    for name in files if isinstance(files, dict) else ():
        if not _inside(root, name):
            raise InputError(f"{path}: names {name!r}, which is outside of the bundle. Do not use this bundle.")
    if fault := manifest_fault(data):
        raise InputError(
            f"{path}: not a valid manifest: {fault}. Do not use it; merge again, or copy the bundle again."
        )
    for place in (place for place in map(PurePosixPath, data["files"]) if place.name in CONFIGS):
        refuse_code(folder / place.parent, [place.name])
    return data


def _inside(root: Path, name: str) -> bool:
    """Whether a name in a manifest is a path within the folder `root`, itself no link, on every system."""
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or "\0" in name:
        return False
    return stays_inside(root, name)


def find_damage(
    folder: Path,
    manifest: dict[str, Any],
    progress: Callable[[str], None] = lambda name: None,
    *,
    sums: bool | Callable[[str], bool] = True,
) -> list[str]:
    """Files that are not what the manifest says, by size and SHA-256; `progress` is called with each name.

    `sums` tells whether checksums are compared, or which files' are. The card of a bundle in the hub's cache may be another
    one: cards are edited on the hub, and nothing reads them but people.
    """
    faults = []
    cached = hub_blobs(folder) is not None
    for name, entry in manifest["files"].items():
        progress(name)
        if cached and name == CARD:
            continue
        path = folder / name
        if not path.is_file():
            faults.append(f"{name}: missing")
        elif path.stat().st_size != entry["bytes"]:
            faults.append(f"{name}: {path.stat().st_size} bytes, should be {entry['bytes']}")
        elif (sums(name) if callable(sums) else sums) and file_sha256(path) != entry["sha256"]:
            faults.append(f"{name}: its bytes have changed (SHA-256 differs)")
        elif sums and path.suffix == ".safetensors":
            faults += _header_faults(folder, name)
    # Libraries that load a tokenizer or a model read whatever lies in its folder.
    loaded = (p for part in LOADED for p in sorted((folder / part).rglob("*")) if p.is_file() or p.is_symlink())
    names = (path.relative_to(folder).as_posix() for path in loaded)
    return faults + [f"{name}: not in the manifest; remove it" for name in names if name not in manifest["files"]]


def _header_faults(folder: Path, name: str) -> list[str]:
    """What is wrong with a file of tensors whose bytes are those that were signed."""
    try:
        read_header(folder / name)
    except InputError as error:
        return [str(error).replace(str(folder / name), name)]
    return []
