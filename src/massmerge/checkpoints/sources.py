"""Where a base, an expert or a head comes from: a folder, a file, an address, or a hub id with an optional revision."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from massmerge.checkpoints.addressed import Addressed, find_addressed
from massmerge.checkpoints.gguf import refuse_gguf
from massmerge.checkpoints.open_clip import CONFIG as OPEN_CLIP
from massmerge.checkpoints.open_clip import named_as_transformers
from massmerge.checkpoints.sentence_folder import MODULES, backbone_folder, read_modules
from massmerge.checkpoints.stores import HeaderStore, Store, open_file, open_folder, open_remote, weight_files
from massmerge.errors import InputError
from massmerge.io.addresses import hub_id, is_address
from massmerge.io.hub import first_line, split_revision
from massmerge.io.json_file import read_object
from massmerge.io.links import stays_inside
from massmerge.io.remote import RemoteFile
from massmerge.io.tensor_file import DTYPES, TensorInfo

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")
_MODULE = re.compile(r"\d+_\w+/config\.json")  # of a module of sentence-transformers
_WEIGHTS_AND_CONFIGS = (".safetensors", ".bin", ".onnx", ".json")
CARD = "README.md"
SETFIT = "config_setfit.json"
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", CARD]
PROCESSOR_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
)  # fmt: skip

_KNOWN = (
    "config.json", "adapter_config.json", "generation_config.json", OPEN_CLIP, MODULES, SETFIT, CARD, *PROCESSOR_FILES
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A place that weights come from, found but not read."""

    text: str
    path: Path | None = None
    """The folder or file on this machine; none for an address, and a hub repository of which only headers were fetched."""
    revision: str | None = None
    """The hub's commit or the versions of an address's files, so that a bundle says what it was made from."""
    remote: dict[str, Path] = field(default_factory=dict)
    """Small files fetched from a repository or an address that has not been downloaded."""
    outer: Path | None = None
    """The folder that was named, where the backbone lies in a folder inside it."""
    weights: dict[str, RemoteFile] = field(default_factory=dict)
    """Files of an address that are read by ranges."""
    readable: bool = False
    """Whether tensors are read from there, and not only headers."""

    @property
    def is_file(self) -> bool:
        """Whether this is a single state-dict file, without a configuration of its own."""
        if self.weights:
            return not self.remote and self.text.endswith(tuple(self.weights))
        return self.path is not None and self.path.is_file()

    @property
    def at_hand(self) -> bool:
        """Whether its tensors can be read; of a hub repository that was not downloaded only headers are known."""
        return self.path is not None or self.readable

    @property
    def configs(self) -> Path | None:
        """The folder of its configurations on this machine."""
        return self.path if self.path is not None else next((path.parent for path in self.remote.values()), None)

    def file(self, name: str) -> Path | None:
        """A file of the folder, or none.

        Raises:
            InputError: it is a link that leaves the folder.
        """
        if self.path is None:
            return self.remote.get(name)
        path = self.path / name
        return self._own(path) if self.path.is_dir() and path.is_file() else None

    def around(self, name: str) -> Path | None:
        """A file of the folder that was named, or of a folder in it; none if it is not there."""
        folder = self.path if self.outer is None else self.outer
        if folder is None:
            return self.remote.get(name)
        return self._own(folder / name) if (folder / name).is_file() else None

    def _own(self, path: Path) -> Path:
        """A file of the folder that was named; what it is a link to elsewhere would get into what is made of it."""
        root = self.path if self.outer is None else self.outer
        if root is not None and not stays_inside(root.resolve(), str(path)):
            raise InputError(f"{path}: is a link to a file outside of its folder. Put a copy in its place.")
        return path

    def around_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder that was named; empty if it is not there."""
        path = self.around(name)
        return {} if path is None else read_object(path)

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the folder as a dictionary, or none."""
        path = self.file(name)
        return None if path is None else read_object(path)

    def store(self, stem: str = "model", pickle_stem: str = "pytorch_model") -> Store:
        """The tensors: of the file, of the folder's weights, or the headers of a hub repository."""
        if self.weights:
            store = open_remote(self.text, self.configs or Path(), self.weights, stem)
        elif self.path is None:
            store = _remote_headers(self.text, f"{stem}.safetensors")
        else:
            store = open_file(self.path) if self.path.is_file() else open_folder(self.path, stem, pickle_stem)
        return named_as_transformers(store)

    def files(self) -> list[Path]:
        """Every file of the source that matters, for telling whether it has changed."""
        if self.path is None:
            return []
        if self.path.is_file():
            return [self.path]
        inside = self.outer.rglob("*") if self.outer else self.path.iterdir()
        return sorted(p for p in inside if p.suffix in _WEIGHTS_AND_CONFIGS and p.is_file())


def find_source(text: str, relative_to: Path, *, download: bool, whole: bool = False) -> Source:
    """Find what a recipe names.

    Args:
        text: a path, absolute or relative to the recipe, an address, or a hub id such as `me/model` or `me/model@revision`.
        relative_to: the recipe's folder.
        download: whether a hub repository's weights are fetched and those of an address may be read, or only configuration
            and headers.
        whole: whether weights of an address are fetched too, for who maps them.

    Raises:
        InputError: it does not exist.
    """
    if "\0" in text:
        raise InputError(f"{text!r}: not a valid name for a file or folder.")
    if (repository := hub_id(text)) is not None:
        return _find_on_hub(repository, Path(repository), download=download)
    if is_address(text):
        refuse_gguf(text, Path(text))
        found = find_addressed(text.rstrip("/"), _KNOWN, download=download, whole=whole)
        return _remote(found, readable=download)
    path = relative_to / Path(text).expanduser()
    if path.exists():
        refuse_gguf(text, path.resolve())
        return _found(text, path.resolve())
    if text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text):
        raise InputError(f"{text}: no such file or folder (looked for {path.resolve()}).")
    return _find_on_hub(text, path, download=download)


def _found(text: str, path: Path, revision: str | None = None) -> Source:
    """A source on this machine; the backbone of sentence-transformers may lie in a folder inside."""
    inside = backbone_folder(path) if path.is_dir() else path
    return Source(text, inside, revision, outer=None if inside == path else path)


def _remote(found: Addressed, *, readable: bool) -> Source:
    """A source at an address; weights that cannot be read by ranges are on this machine already."""
    if not found.weights:
        return _found(found.address, found.folder, found.revision)
    folder, inside = found.folder, found.inside
    below = "" if inside == folder else f"{inside.relative_to(folder).as_posix()}/"
    weights = {name.removeprefix(below): f for name, f in found.weights.items() if name.startswith(below)}
    return Source(found.address, None, found.revision, found.small(), weights=weights, readable=readable)


def _find_on_hub(text: str, path: Path, *, download: bool) -> Source:
    from huggingface_hub import snapshot_download

    repo, revision = split_revision(text)
    options: dict[str, Any] = {"revision": revision}
    try:
        cached = Path(snapshot_download(repo, local_files_only=True, **options))
        if _has_weights(cached):
            return _found(text, cached, cached.name)
    except (OSError, ValueError):
        pass  # not in the cache: ask the hub
    try:
        if not download:
            return _fetch_small_files(text, repo, options)
        for kind in ("*.safetensors", "*.bin"):
            # Subfolders hold other formats and checkpoints of the training: many times the weights that are wanted.
            wanted: dict[str, Any] = {"allow_patterns": [*_SMALL_FILES, kind], "ignore_patterns": ["*/*"]}
            folder = Path(snapshot_download(repo, **wanted, **options))
            if _has_weights(folder):
                break
        places = [place for _, place in read_modules(folder / MODULES) if place] if (folder / MODULES).is_file() else []
        if places:
            names = ("config.json", "model.safetensors", "pytorch_model.bin", *PROCESSOR_FILES)
            parts = [f"{place}/{name}" for place in places for name in names]
            folder = Path(snapshot_download(repo, allow_patterns=parts, **options))
        return _found(text, folder, folder.name)
    except InputError:
        raise
    except Exception as error:  # the hub's client passes on errors of whatever transport it uses
        raise InputError(
            f"{text}: no such file or folder (looked for {path.resolve()}), and not available from the hub "
            f"({first_line(error)}). "
            "Check the path; for a hub id, download it once while online."
        ) from None


def _has_weights(folder: Path) -> bool:
    """Whether a snapshot holds a model's or an adapter's weights, all shards of them.

    One that was only planned with, or whose download was interrupted, does not.
    """
    folder = backbone_folder(folder)
    for stems in (("model", "pytorch_model"), ("adapter_model", "adapter_model")):
        try:
            return bool(weight_files(folder, *stems))
        except InputError:
            continue
    return False


def _fetch_small_files(text: str, repo: str, options: dict[str, Any]) -> Source:
    from huggingface_hub import HfApi, hf_hub_download

    info = HfApi().model_info(repo, **options)
    wanted = {"config.json", "adapter_config.json", MODULES, SETFIT, *PROCESSOR_FILES}
    names = [s.rfilename for s in info.siblings or []]
    present = [name for name in names if name in wanted or _MODULE.fullmatch(name)]
    files = {name: Path(hf_hub_download(repo, name, **options)) for name in present}
    return Source(text, None, info.sha, files)


def _remote_headers(text: str, filename: str) -> Store:
    """Names and shapes of a hub repository's tensors, by range requests of the files' headers."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError

    repo, revision = split_revision(text)
    api = HfApi()
    try:
        if filename == "model.safetensors":
            files = list(api.get_safetensors_metadata(repo, revision=revision).files_metadata.values())
        else:
            files = [api.parse_safetensors_file_metadata(repo, filename, revision=revision)]
    except NotASafetensorsRepoError:
        raise InputError(f"{text}: has only pickled weights, whose shapes cannot be read before a download.") from None
    except Exception as error:  # the hub's client passes on errors of whatever transport it uses
        raise InputError(
            f"{text}: the header of {filename} is not available from the hub ({first_line(error)}). "
            "Download it once, then plan again."
        ) from None
    tensors = {name: info for file in files for name, info in file.tensors.items()}
    unknown = sorted({str(t.dtype) for t in tensors.values()} - DTYPES.keys())
    if unknown:
        raise InputError(f"{text}: holds tensors of type {', '.join(unknown)}, which cannot be merged.")
    return HeaderStore({n: TensorInfo(tuple(t.shape), DTYPES[str(t.dtype)]) for n, t in tensors.items()})
