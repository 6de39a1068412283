"""Sources in object stores and on web servers: small files are fetched, tensors are read by byte ranges."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from massmerge.checkpoints.sentence_folder import backbone_folder
from massmerge.checkpoints.stores import WEIGHTS, weight_names
from massmerge.errors import InputError
from massmerge.io.remote import RemoteFile, list_files, look_up
from massmerge.io.remote_cache import fetch, revision_of
from massmerge.io.shards import INDEX, shard_names

_SMALL = (".json", ".txt", ".model", ".jinja", ".md")
_SMALL_LIMIT, _MOST_SMALL = 100_000_000, 200  # bytes of a file that is no weights; how many of them
_STEMS = (("model", "pytorch_model"), ("adapter_model", "adapter_model"))
_RANGED = ".safetensors"


@dataclass(frozen=True)
class Addressed:
    """What an address holds, looked up."""

    address: str
    revision: str
    """The versions of all files that were listed, as one name."""
    folder: Path
    """Where the fetched files are, under their names."""
    weights: dict[str, RemoteFile]
    """Files of tensors that are read by ranges."""

    def small(self) -> dict[str, Path]:
        """The fetched files that are no weights, by their names from the folder, and from where the backbone lies."""
        homes = dict.fromkeys((self.folder, self.inside))
        files = ((home, path) for home in homes for path in home.rglob("*") if path.is_file())
        return {path.relative_to(home).as_posix(): path for home, path in files if path.name.endswith(_SMALL)}

    @property
    def inside(self) -> Path:
        """Where the backbone's small files are: in the folder, or in one that its `modules.json` names."""
        return backbone_folder(self.folder) if self.folder.is_dir() else self.folder


def find_addressed(address: str, known: tuple[str, ...], *, download: bool, whole: bool = False) -> Addressed:
    """Look up what an address holds. Of safetensors no byte is read; other weights come whole, for nothing else can be.

    Args:
        address: a folder of a model or an adapter, or one file of weights.
        known: names of small files that are asked for where a store gives no listing.
        download: whether weights that are not safetensors are fetched.
        whole: whether all weights are.

    Raises:
        InputError: nothing is there, or it has only weights that would have to be downloaded.
    """
    name = PurePosixPath(address).name
    if PurePosixPath(address).suffix in WEIGHTS:
        file = look_up(address)
        files = {} if file is None else {name: file}
    else:
        files = list_files(address, (*known, *(n for pair in _STEMS for n in weight_names(*pair))))
    if not files:
        raise InputError(f"{address}: no such file or folder.")
    revision = revision_of(files)
    small = {n: f for n, f in files.items() if n.endswith(_SMALL) and f.size <= _SMALL_LIMIT}
    folder = fetch(dict(sorted(small.items())[:_MOST_SMALL]), revision)
    files |= _shards(address, folder, files)
    ranged = {n: f for n, f in files.items() if n.endswith(_RANGED)}
    rest = {n: f for n, f in files.items() if PurePosixPath(n).suffix in WEIGHTS and n not in ranged}
    if whole:
        rest, ranged = rest | ranged, {}
    if rest and not ranged:
        if not download:
            raise InputError(f"{address}: has only weights whose shapes cannot be read before a download.")
        fetch(rest, revision)
    return Addressed(address, revision, folder / name if name in rest else folder, ranged)


def _shards(address: str, folder: Path, listed: dict[str, RemoteFile]) -> dict[str, RemoteFile]:
    """Shards that an index names and no listing has shown, as on web servers."""
    found = {}
    for index in folder.rglob(f"*{INDEX}"):
        home = index.parent.relative_to(folder)
        with suppress(InputError):  # who opens the index will say so
            for name in shard_names(index):
                place = (home / name).as_posix()
                if place not in listed and (file := look_up(f"{address}/{place}")):
                    found[place] = file
    return found
