"""Bundles at addresses: loaded through the cache, and published so that half of one is never taken for a bundle."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from massmerge.bundle.layout import MANIFEST
from massmerge.bundle.manifest import read_manifest
from massmerge.errors import DamageError, InputError
from massmerge.io.addresses import hub_id, is_address, join
from massmerge.io.checksums import file_sha256
from massmerge.io.durable import drafted
from massmerge.io.json_file import parse_json
from massmerge.io.remote import download, look_up, put, remove
from massmerge.io.remote_cache import cache_folder, place_for, staging_path

_MANIFEST_LIMIT = 100_000_000  # bytes


def cached_bundle(address: str) -> Path:
    """The folder of the cache that holds a bundle, or a static merge, of an address.

    The manifest comes first, and only what it lists is fetched; each file's checksum is compared before it counts. What is
    in the cache is not fetched again.

    Raises:
        InputError: there is no bundle at the address.
        DamageError: a file there is not what the manifest says.
    """
    draft = cache_folder("bundles") / f"{uuid.uuid4().hex}.draft"
    draft.mkdir()
    try:
        _fetch_manifest(address, draft)
        manifest = read_manifest(draft)
        folder = cache_folder("bundles") / str(manifest["sha256"])
        with FileLock(f"{folder}.lock"):
            if not (folder / MANIFEST).is_file():
                _fetch_files(address, folder, manifest["files"])
                (draft / MANIFEST).replace(folder / MANIFEST)
        if read_manifest(folder)["sha256"] != manifest["sha256"]:
            raise DamageError(f"{folder}: holds another bundle than its name says. Delete this folder.")
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _fetch_manifest(address: str, folder: Path) -> None:
    found = look_up(join(address, MANIFEST))
    if found is None:
        raise InputError(f"{address}: not a bundle (no {MANIFEST} there), or not completely published.")
    if found.size > _MANIFEST_LIMIT:
        raise InputError(f"{found}: {found.size:,} bytes long, which no manifest is.")
    download(found, folder / MANIFEST)


def _fetch_files(address: str, folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    for name, entry in files.items():
        target = place_for(folder, name)
        if target.is_file() and target.stat().st_size == entry["bytes"] and file_sha256(target) == entry["sha256"]:
            continue  # of a download that was interrupted
        found = look_up(join(address, name))
        if found is None or found.size != entry["bytes"]:
            held = "missing" if found is None else f"{found.size} bytes, should be {entry['bytes']}"
            raise DamageError(f"{address}: {name}: {held}. Publish the bundle again.")
        with drafted(target) as draft:
            download(found, draft)
            if file_sha256(draft) != entry["sha256"]:
                raise DamageError(f"{address}: {name}: its bytes have changed (SHA-256 differs). Publish it again.")


def published_sha256(address: str) -> str | None:
    """The checksum of the manifest that is published at an address; none if there is none, or not one of ours."""
    found = look_up(join(address, MANIFEST))
    if found is None:
        return None
    with found.open() as file:
        try:
            said = parse_json(file.read(_MANIFEST_LIMIT))
            return str(said["sha256"])
        except (ValueError, KeyError, TypeError):
            return ""


def refuse_published(address: str, *, overwrite: bool) -> None:
    """Refuse an address that already holds another result than the one that is staged here.

    Raises:
        InputError: it does, and is not to be overwritten.
    """
    there, staged = published_sha256(address), staging_path(address)
    own = read_manifest(staged)["sha256"] if (staged / MANIFEST).is_file() else None
    if there is not None and there != own and not overwrite:
        raise InputError(f"{address}: already holds a bundle. Choose another address, or use --overwrite.")


def publish(folder: Path, address: str, *, step: Callable[[str], None] = lambda name: None) -> None:
    """Put a bundle, or a static merge, at an address: the files that its manifest lists, and the manifest last.

    A manifest that is there goes first, so that at no time one stands beside files of another bundle.

    Args:
        folder: the result.
        address: where it goes; what else lies there is left alone, but for files of the bundle before.
        step: is called with the name of each file that is sent.
    """
    manifest = read_manifest(folder)
    if published_sha256(address) == manifest["sha256"]:
        return
    before = _listed_there(address)
    remove(join(address, MANIFEST))
    for name in manifest["files"]:
        step(name)
        put(folder / name, join(address, name))
    for name in sorted(before - set(manifest["files"])):
        remove(join(address, name))
    put(folder / MANIFEST, join(address, MANIFEST))


def _listed_there(address: str) -> set[str]:
    """The files of the bundle that is at an address; nothing of a manifest that is not valid."""
    draft = cache_folder("outputs") / f"{uuid.uuid4().hex}.draft"
    draft.mkdir()
    try:
        _fetch_manifest(address, draft)
        return set(read_manifest(draft)["files"])
    except InputError:
        return set()
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def published(out: str | Path, *, overwrite: bool, step: Callable[[str], None] = lambda name: None) -> Iterator[Path]:
    """Where a result for `out` is made: there, or for an address in the cache, from where it is published in the end.

    Args:
        out: a folder or an address.
        overwrite: whether a bundle at the address is replaced.
        step: is called with the name of each file that is sent.

    Raises:
        InputError: the address already holds another bundle, or belongs to the hub.
    """
    if not is_address(out):
        yield Path(out)
        return
    address = str(out).rstrip("/")
    if hub_id(address) is not None:
        raise InputError(f"{address}: the hub takes whole commits. Merge to a folder, then use `mass push`.")
    refuse_published(address, overwrite=overwrite)
    folder = staging_path(address)
    yield folder
    publish(folder, address, step=step)
