"""Puts a bundle, or a static merge, on the hub in one commit, or at an address. Does not import transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from massmerge.bundle.layout import CARD, MANIFEST, holds_base
from massmerge.bundle.manifest import find_damage, read_manifest
from massmerge.bundle.stored import publish
from massmerge.errors import DamageError, InputError, listing
from massmerge.io.addresses import is_address
from massmerge.io.hub import client_options, hub_errors, is_repository
from massmerge.io.json_file import read_json

_OTHERS = {".gitattributes", CARD, "LICENSE"}
"""Files that a repository may hold before a bundle comes to it."""


@dataclass(frozen=True)
class Push:
    """What was put on the hub, or what would be."""

    repo: str
    revision: str
    url: str | None
    """The commit's page; none at an address, and where nothing was sent."""
    commit: str | None
    files: int
    bytes: int
    removed: tuple[str, ...] = ()
    """Files of the bundle that was there before and are not part of this one."""
    local_paths: tuple[str, ...] = ()
    """Absolute paths of this machine that the bundle names, and that others will read."""
    sent: bool = False
    """Whether it lies at an address now, which has no commits."""

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self)


def push_bundle(
    bundle: str | Path,
    repo: str,
    *,
    private: bool = False,
    revision: str = "main",
    message: str | None = None,
    dry_run: bool = False,
    token: str | None = None,
) -> Push:
    """Upload a bundle, or a static merge, to the hub: the files that its manifest lists, and nothing else.

    All of it is one commit: the hub has the whole bundle or the one before. An interrupted upload continues where it was
    when the call is repeated.

    Args:
        bundle: the bundle's folder; every checksum is compared first.
        repo: the repository, `me/name`, which is created if there is none; or an address, where the manifest is sent last.
        private: create a private repository. One that exists stays as it is.
        revision: the branch to commit to; it is created if there is none.
        message: of the commit.
        dry_run: check the bundle, and send nothing.
        token: a token of the hub, if it is not the saved one.

    Raises:
        InputError: not a bundle, damaged, or not usable elsewhere; not a repository's name, or one with another model in it.
        MassError: the hub cannot be reached.
    """
    if not is_repository(repo, with_revision=False) and not is_address(repo):
        raise InputError(f"{repo}: not a name of a repository. Write me/name, or an address; --revision is the branch.")
    folder = Path(bundle)
    manifest = read_manifest(folder)
    if faults := find_damage(folder, manifest):
        raise DamageError(f"{folder}: damaged, so it is not uploaded:{listing(faults)}")
    _refuse_local_base(folder, manifest)
    size = sum(int(entry["bytes"]) for entry in manifest["files"].values()) + (folder / MANIFEST).stat().st_size
    names = [MANIFEST, *manifest["files"]]
    done = Push(repo, revision, None, None, len(names), size, local_paths=_local_paths(manifest))
    if dry_run:
        return done
    if is_address(repo):
        publish(folder, repo.rstrip("/"))
        return replace(done, sent=True)
    commit, removed = _send(folder, names, repo, private, revision, message, token)
    return replace(done, url=commit.commit_url, commit=commit.oid, removed=tuple(removed), sent=True)


def _send(
    folder: Path, names: list[str], repo: str, private: bool, revision: str, message: str | None, token: str | None
) -> tuple[Any, list[str]]:
    """The commit, and what it removed."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(**client_options(token))
    with hub_errors(f"{repo}@{revision}"):
        api.create_repo(repo, private=private or None, exist_ok=True)
        if revision != "main":
            api.create_branch(repo, branch=revision, exist_ok=True)
        parent = api.model_info(repo, revision=revision)
        held = [sibling.rfilename for sibling in parent.siblings or []]
        removed = sorted(_listed_there(api, repo, parent.sha, held) & set(held) - set(names))
        operations: list[Any] = [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=_content(folder / name, repo)) for name in names),
            *(CommitOperationDelete(path_in_repo=name) for name in removed),
        ]
        said = message or f"Upload {folder.resolve().name} with massmerge"
        sent = api.create_commit(repo, operations, commit_message=said, revision=revision, parent_commit=parent.sha)
    return sent, removed


def _content(path: Path, repo: str) -> Path | bytes:
    """A file to upload; the lines of the card that load the bundle load it from the hub there."""
    if path.name != CARD:
        return path
    return path.read_bytes().replace(b'(".")', f'("{repo}")'.encode())


def _listed_there(api: Any, repo: str, commit: str | None, held: Iterable[str]) -> set[str]:
    """The files of the bundle that is in a repository already; one with something else in it is left alone."""
    if MANIFEST not in held:
        if foreign := sorted(set(held) - _OTHERS):
            raise InputError(
                f"{repo}: holds something that is no bundle:{listing(foreign, 5)}\n"
                "  Choose another name, or delete these files first."
            )
        return set()
    try:
        there = read_json(Path(api.hf_hub_download(repo, MANIFEST, revision=commit)))
        return set(there["files"])
    except (ValueError, KeyError, TypeError):
        return set()  # not one of ours any more: it is replaced, and nothing else is touched


def _refuse_local_base(folder: Path, manifest: dict[str, Any]) -> None:
    base = manifest["base"]
    if not holds_base(manifest["files"]) and "location" in base and base.get("revision") is None:
        raise InputError(
            f"{folder}: its base is a reference to {base['location']}, which others do not have. Merge with "
            "`base: copy`, or with a base from the hub."
        )


def _local_paths(manifest: dict[str, Any]) -> tuple[str, ...]:
    """Absolute paths among the names of base and experts."""
    tasks = [task for task in manifest["tasks"] if isinstance(task, dict)]
    named = [part.get("source") for part in (manifest["base"], *tasks)]
    return tuple(dict.fromkeys(str(name) for name in named if name and Path(str(name)).expanduser().is_absolute()))
