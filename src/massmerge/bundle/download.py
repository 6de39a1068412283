"""Bundles of the hub and of addresses: the folder that is read, and copies to work with. Does not import transformers."""

from __future__ import annotations

import shutil
from glob import escape
from pathlib import Path
from typing import Any

from massmerge.bundle.card import card_entry
from massmerge.bundle.layout import CARD, MANIFEST, MOVED, work_folder
from massmerge.bundle.manifest import find_damage, read_manifest, sign_manifest
from massmerge.bundle.stored import cached_bundle
from massmerge.bundle.work_folder import WorkFolder, in_words
from massmerge.errors import DamageError, InputError, listing
from massmerge.io.addresses import hub_id, is_address
from massmerge.io.hub import client_options, hub_errors, is_repository, split_revision
from massmerge.io.links import hub_blobs
from massmerge.io.remote_cache import in_cache


def is_on_hub(path: str | Path) -> bool:
    """Whether this names a bundle on the hub, `me/name` or `me/name@revision`; a folder of that name goes first."""
    folder = Path(path)
    if hub_id(str(path)) is not None:
        return True
    return is_repository(str(path)) and not folder.exists() and not (work_folder(folder) / MOVED).is_dir()


def find_bundle(path: str | Path) -> Path:
    """The folder of a bundle: the one given, or that of a hub id or an address in a cache, downloaded if it is not there.

    Raises:
        InputError: the hub has no such repository or revision, or it holds no bundle.
        MassError: it is not in the cache, and the hub cannot be reached.
    """
    if is_on_hub(path):
        return _snapshot(hub_id(str(path)) or str(path))
    return cached_bundle(str(path).rstrip("/")) if is_address(path) else Path(path)


def refuse_hub(path: str | Path) -> None:
    """Raise an error for a bundle on the hub, at an address or in a cache, where a command would change it."""
    if is_address(path) or is_on_hub(path) or hub_blobs(Path(path)) or in_cache(Path(path)):
        raise InputError(f"{path}: not a folder of yours. To change this bundle, first `mass pull` it to one.")


def _snapshot(text: str, token: str | None = None) -> Path:
    """The hub's cache of a bundle. Its manifest comes first: only what that lists is fetched."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    repo, revision = split_revision(text)
    with hub_errors(text):
        try:
            folder = Path(hf_hub_download(repo, MANIFEST, revision=revision, **client_options(token))).parent
        except RemoteEntryNotFoundError:
            raise InputError(f"{text}: not a bundle (no {MANIFEST} in the repository).") from None
    files = read_manifest(folder)["files"]
    absent = [name for name in files if not (folder / name).is_file()]
    if any(name != CARD for name in absent):  # which may have been deleted there
        _fetch(text, folder, absent, token=token)
    return folder


def _fetch(text: str, folder: Path, names: list[str], **options: Any) -> None:
    """Download files of a commit, which is the snapshot's name; what an interrupted download left is continued."""
    from huggingface_hub import snapshot_download

    repo, _ = split_revision(text)
    options = {**client_options(options.pop("token", None)), **options}
    with hub_errors(text):
        snapshot_download(repo, revision=folder.name, allow_patterns=[escape(name) for name in names], **options)


def pull_bundle(
    repo: str, folder: str | Path | None = None, *, overwrite: bool = False, token: str | None = None
) -> Path:
    """Download a bundle from the hub, and compare all of its checksums.

    Args:
        repo: a hub id such as `me/name` or `me/name@revision`, or an address.
        folder: where to put a copy, which may be changed; without it the bundle stays in the cache.
        overwrite: replace a bundle that is in `folder`.
        token: a token of the hub, if it is not the saved one.

    Returns:
        The bundle's folder.

    Raises:
        InputError: the hub has no such repository or revision, it holds no bundle, or a damaged one; or the folder is taken.
        MassError: the hub cannot be reached, or the disk is full.
    """
    repo = hub_id(repo) or repo
    if not is_repository(repo) and not is_address(repo):
        raise InputError(f"{repo}: not a hub id. Write me/name or me/name@revision, or an address.")
    if folder is not None:
        _refuse_taken(Path(folder), overwrite=overwrite)
    if is_address(repo):
        snapshot = cached_bundle(repo.rstrip("/"))
        manifest = read_manifest(snapshot)
        if faults := find_damage(snapshot, manifest):
            raise DamageError(f"{snapshot}: damaged:{listing(faults)}\n  Delete this folder, and pull again.")
        return snapshot if folder is None else _copy(snapshot, manifest, Path(folder), replacing=overwrite)
    snapshot = _snapshot(repo, token)
    manifest = read_manifest(snapshot)
    damaged = [fault.partition(":")[0] for fault in find_damage(snapshot, manifest)]
    if damaged:  # in the cache, or in the repository: what is fetched again tells
        _fetch(repo, snapshot, damaged, token=token, force_download=True)
        if faults := find_damage(snapshot, manifest):
            raise DamageError(f"{repo}: damaged on the hub:{listing(faults)}\n  Push the bundle again.")
    return snapshot if folder is None else _copy(snapshot, manifest, Path(folder), replacing=overwrite)


def _refuse_taken(folder: Path, *, overwrite: bool) -> None:
    if folder.is_file():
        raise InputError(f"{folder}: is a file. Choose another folder.")
    if folder.is_dir() and any(folder.iterdir()):
        if not overwrite:
            raise InputError(f"{folder}: already exists. Choose another folder, or use --overwrite.")
        read_manifest(folder)  # what is no bundle is not replaced


def _copy(snapshot: Path, manifest: dict[str, Any], target: Path, *, replacing: bool) -> Path:
    """A snapshot as a folder of files of its own; a card that was edited on the hub enters the manifest as it is."""
    work = WorkFolder(target)
    with in_words(work.path), work.held():
        try:
            result = work.fresh_result()
            files = {name: entry for name, entry in manifest["files"].items() if (snapshot / name).is_file()}
            for name in files:
                (result / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(snapshot / name, result / name)
            if CARD in files:
                files[CARD] = card_entry(result)
            sign_manifest(result, {**manifest, "files": files})
            work.publish(replacing=replacing)
        finally:
            work.discard()
    return target
