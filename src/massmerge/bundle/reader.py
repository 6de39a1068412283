"""The folder that a merge writes and everything else reads: manifest, checksums, versions."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from torch import Tensor

from massmerge.bundle.manifest import BASE_WEIGHTS, FORMAT_VERSION, STATISTICS, manifest_fault
from massmerge.bundle.problem_types import read_problem
from massmerge.checkpoints.backbone import auto_class, language_class
from massmerge.checkpoints.pretrained import CONFIGS, pretrained_config, refuse_code
from massmerge.errors import DamageError, InputError, listing
from massmerge.io.durable import write_text
from massmerge.io.tensor_file import TensorInfo, read_header, read_tensor
from massmerge.linalg.factors import Factors
from massmerge.recipe import ProblemType, Recipe

MANIFEST = "mass.json"
MOVED = "replaced"  # where a work folder keeps a bundle that is about to be replaced
FIXED = "fixed.safetensors"
ROUTER = "router.safetensors"
HEADS = "heads"  # of a static merge
LEFT_OVER = (f".{MANIFEST}.draft", f".{ROUTER}.draft")
"""Drafts that earlier versions left in a bundle when they were killed; of no use to anyone."""
_CHUNK = 1 << 20
_MANIFEST_LIMIT = 100_000_000  # bytes
_LOADED = ("base", "processor", "tasks")


def work_folder(target: Path, kind: str = "partial") -> Path:
    """The folder beside a target in which a command works."""
    return target.parent / f".{target.name}.{kind}"


def file_sha256(path: Path, start: bytes = b"") -> str:
    """SHA-256 of a file, read in pieces, or of some bytes and the file after them."""
    with path.open("rb") as file:
        return sha256_of(file, start)


def sha256_of(file: BinaryIO, start: bytes = b"") -> str:
    """SHA-256 of an open file, read from its start in pieces, or of some bytes and the file after them."""
    digest = hashlib.sha256(start)
    file.seek(0)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def crc32_of(file: BinaryIO) -> str:
    """CRC-32 of an open file: finds accidents in half the time that SHA-256 takes."""
    found = 0
    file.seek(0)
    while chunk := file.read(_CHUNK):
        found = zlib.crc32(chunk, found)
    return f"{found:08x}"


def holds_tensors(name: str) -> bool:
    """Whether a file of a bundle is one of the large ones, which stay on disk and are mapped."""
    return name == BASE_WEIGHTS or name.endswith("/factors.safetensors")


def write_manifest(folder: Path, data: dict[str, Any]) -> None:
    """Write the manifest of a complete folder, with size and checksums of every file in it."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    files = {p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in paths}
    for name in filter(holds_tensors, files):
        with (folder / name).open("rb") as file:
            files[name]["crc32"] = crc32_of(file)
    sign_manifest(folder, {"format_version": FORMAT_VERSION, **data, "files": files})


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
                f"{folder}: a command that was replacing it was killed; what was there is in {moved}. Run it again."
            )
        raise InputError(f"{folder}: no such folder.")
    if not path.is_file():
        raise InputError(f"{folder}: not a bundle (no {MANIFEST} in it). `mass merge recipe.yaml {folder}` makes one.")
    try:
        if path.stat().st_size > _MANIFEST_LIMIT:
            raise ValueError(f"{path.stat().st_size} bytes long")
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({error!r}). Merge again, or copy the bundle again.") from None
    if not isinstance(version, int) or version > FORMAT_VERSION or version < 1:
        raise InputError(
            f"{path}: has format version {version}, this massmerge reads up to {FORMAT_VERSION}. "
            "`pip install -U massmerge` gets a newer one."
        )
    if data.get("sha256") != _manifest_sha256(data):
        raise InputError(f"{path}: its bytes have changed (SHA-256 differs). Merge again, or copy the bundle again.")
    files = data.get("files")
    for name in files if isinstance(files, dict) else ():
        if not _inside(folder, name):
            raise InputError(f"{path}: names {name!r}, which is outside of the bundle. Do not use this bundle.")
    if fault := manifest_fault(data):
        raise InputError(f"{path}: not as a merge writes it: {fault}. Do not use it; merge again, or copy it again.")
    for place in map(PurePosixPath, data["files"]):
        refuse_code(folder / place.parent, [place.name] if place.name in CONFIGS else [])
    return data


def _inside(folder: Path, name: str) -> bool:
    """Whether a name in a manifest is a path within the folder, after symbolic links too."""
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\\" in name or "\0" in name:
        return False
    return (folder / name).resolve().is_relative_to(folder.resolve())


def find_damage(
    folder: Path,
    manifest: dict[str, Any],
    progress: Callable[[str], None] = lambda name: None,
    *,
    sums: bool | Callable[[str], bool] = True,
) -> list[str]:
    """Files that are not what the manifest says, by size and SHA-256; `progress` hears each name.

    `sums` tells whether checksums are compared, or which files' are.
    """
    faults = []
    for name, entry in manifest["files"].items():
        progress(name)
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
    loaded = (p for part in _LOADED for p in sorted((folder / part).rglob("*")) if p.is_file())
    names = (path.relative_to(folder).as_posix() for path in loaded)
    return faults + [f"{name}: not in the manifest; remove it" for name in names if name not in manifest["files"]]


def _header_faults(folder: Path, name: str) -> list[str]:
    """What is wrong with a file of tensors whose bytes are those that were signed."""
    try:
        read_header(folder / name)
    except InputError as error:
        return [str(error).replace(str(folder / name), name)]
    return []


@dataclass(frozen=True)
class BundleTask:
    """A task as the manifest describes it."""

    name: str
    source: str
    revision: str | None
    form: str
    head: str
    labels: tuple[str, ...] | None
    problem_type: ProblemType | None
    """What the outputs of its head mean; none without a head."""


class Bundle:
    """A bundle on disk.

    Args:
        path: the folder.
        check: whether every file's checksum is compared with the manifest's.

    Raises:
        InputError: not a bundle, or damaged.
    """

    def __init__(self, path: str | Path, *, check: bool = True) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        if self.manifest.get("method") != "mass":
            opener = auto_class(str(self.manifest.get("base", {}).get("class")))
            raise InputError(
                f"{path}: a {self.manifest.get('method')} merge, which is an ordinary checkpoint and no bundle. "
                f"Load it with transformers: {opener}.from_pretrained({str(path)!r})."
            )
        if check:
            self.refuse_damage(self.damage())

    def refuse_damage(self, faults: list[str]) -> None:
        """Raise an error that lists what is not as the manifest says."""
        if faults:
            raise DamageError(f"{self.path}: damaged:{listing(faults)}\n  Merge again, or copy the bundle again.")

    def damage(
        self, progress: Callable[[str], None] = lambda name: None, *, sums: bool | Callable[[str], bool] = True
    ) -> list[str]:
        """As `find_damage`."""
        return find_damage(self.path, self.manifest, progress, sums=sums)

    def file(self, name: str) -> Path:
        """A file of the bundle; what the manifest does not name is never read."""
        if name not in self.manifest["files"]:
            raise InputError(f"{self.path}: its manifest names no {name}. Merge again, or copy the bundle again.")
        return self.path / name

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe that the bundle was made by."""
        recipe = Recipe.load(self.file("recipe.yaml"))
        if [task.name for task in recipe.tasks] != [task["name"] for task in self.manifest["tasks"]]:
            raise InputError(f"{self.path}: its recipe.yaml and its manifest name other tasks. Merge again.")
        return recipe

    @cached_property
    def tasks(self) -> list[BundleTask]:
        """The tasks, in order."""
        return [self._task(task) for task in self.manifest["tasks"]]

    def _task(self, said: dict[str, Any]) -> BundleTask:
        """A task with its labels and what they mean, which have files of their own."""
        labels = self._labels(said["name"])
        problem = None if labels is None else read_problem(self.path / "tasks" / said["name"] / "head", len(labels))
        known = {key: said[key] for key in ("name", "source", "revision", "form", "head")}
        return BundleTask(**known, labels=labels, problem_type=problem)

    def _labels(self, task: str) -> tuple[str, ...] | None:
        name = f"tasks/{task}/labels.json"
        if name not in self.manifest["files"]:
            return None
        try:
            labels = json.loads(self.file(name).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.path / name}: not valid JSON ({error}). Merge again.") from None
        if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
            raise InputError(f"{self.path / name}: no list of label names. Merge again.")
        return tuple(labels)

    @property
    def ranks(self) -> dict[str, list[int]]:
        """For each factored matrix, the rank kept for each task in order (0: the task leaves it as it is)."""
        return dict(self.manifest["ranks"])

    @cached_property
    def headers(self) -> dict[str, dict[str, TensorInfo]]:
        """For each task, the tensors of its factors file."""
        return {t.name: read_header(self.factors_file(t.name)) for t in self.tasks}

    def _header(self, task: str) -> dict[str, TensorInfo]:
        if task not in self.headers:
            raise InputError(f"{self.path}: no task {task!r}. There are {', '.join(self.headers)}.")
        return self.headers[task]

    def factors_file(self, task: str) -> Path:
        """The file of a task's factors and whole tensors."""
        return self.file(f"tasks/{task}/factors.safetensors")

    def factors(self, task: str, tensor: str) -> Factors | None:
        """A task's factors of one matrix; none where it leaves the base as it is."""
        header = self._header(task)
        if f"{tensor}.s" not in header:
            return None
        return Factors(*(read_tensor(header[f"{tensor}.{part}"]) for part in "usv"))

    def whole(self, task: str, tensor: str) -> Tensor | None:
        """A task's own value of a tensor without factors; none where it leaves the base as it is."""
        info = self._header(task).get(tensor)
        return None if info is None else read_tensor(info)

    @cached_property
    def statistics(self) -> dict[str, Tensor]:
        """Norms, kept energy, cosines and the filter's choice, a row for each matrix of `ranks`."""
        header = read_header(self.file(STATISTICS))
        rows, tasks = len(self.ranks), len(self.manifest["tasks"])
        shapes = {
            "norm": (rows, tasks),
            "energy": (rows, tasks),
            "accepted": (rows, tasks),
            "cosine": (rows, tasks, tasks),
        }
        wrong = [n for n, shape in shapes.items() if n not in header or (rows and header[n].shape != shape)]
        if wrong:
            raise InputError(f"{self.path / STATISTICS}: {', '.join(wrong)} missing, or of another shape. Merge again.")
        return {name: read_tensor(info) for name, info in header.items()}

    @property
    def router_kind(self) -> str:
        """The router in use: the recipe's, or the one that was fitted last."""
        return str(self.manifest.get("router_kind", self.recipe.router.kind))

    @property
    def takes_images(self) -> bool:
        """Whether the base is an image model."""
        return (self.path / "processor" / "preprocessor_config.json").is_file() or "image_size" in self._base_config

    @property
    def writes(self) -> bool:
        """Whether its tasks answer with text: none has labels, and the base generates."""
        if any(task.labels is not None for task in self.tasks):
            return False
        return language_class(pretrained_config(self.path / "base")) is not None

    @cached_property
    def _base_config(self) -> dict[str, Any]:
        return pretrained_config(self.path / "base").to_dict()

    def bytes_of(self, prefix: str) -> int:
        """Bytes of the files whose path starts so."""
        return sum(int(e["bytes"]) for name, e in self.manifest["files"].items() if name.startswith(prefix))

    @property
    def base_dtype(self) -> str:
        """The type of the base's numbers, such as `float32`: that of the factors, which are kept in it."""
        kinds = [i.dtype for header in self.headers.values() for i in header.values() if i.dtype.is_floating_point]
        return str(kinds[0]).removeprefix("torch.") if kinds else "float32"

    @property
    def base_bytes(self) -> int:
        """Bytes of the base's weights, in the bundle or where it refers to."""
        return int(self.manifest["base"]["bytes"])

    @property
    def head_bytes(self) -> int:
        """Bytes of heads and label names, which no budget counts."""
        heads = [f"tasks/{t.name}/{part}" for t in self.tasks for part in ("head/", "labels.json")]
        return sum(self.bytes_of(prefix) for prefix in (*heads, "base/head/"))

    @property
    def counted_bytes(self) -> int:
        """Bytes of everything but heads, the manifest included."""
        manifest = (self.path / MANIFEST).stat().st_size
        by_reference = 0 if BASE_WEIGHTS in self.manifest["files"] else self.base_bytes
        return manifest + self.bytes_of("") - self.head_bytes + by_reference
