"""A bundle's tasks decoded as texts: its singular vectors at a site against a bank of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massmerge.errors import InputError
from massmerge.model.load import load
from massmerge.model.model import Model
from massmerge.research.interpret.plot import refuse_other_format, save_plot
from massmerge.research.interpret.spaces import ClipSpace, StreamSpace, TextSpace
from massmerge.research.interpret.textspan import text_span
from massmerge.routing import Site, choose_sites

BANK = Path(__file__).parent / "bank.txt"
_DEPTH = 0.8  # the paper's site: late enough to mean something, early enough to be cheap


@dataclass(frozen=True)
class DecodedText:
    """One text, and how much of the task's vectors it stands for."""

    text: str
    score: float
    share: float


@dataclass(frozen=True)
class Interpretation:
    """What a task's subspace at a site means."""

    task: str
    site: str
    texts: list[DecodedText]

    def to_dict(self) -> dict[str, Any]:
        """The interpretation as plain data."""
        return asdict(self)


def read_bank(path: Path = BANK) -> list[str]:
    """The texts of a file, one per line; blank lines and repetitions are left out.

    Raises:
        InputError: it cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as one text per line ({error}).") from None
    return list(dict.fromkeys(line.strip() for line in lines if line.strip()))


def interpret(
    bundle: str | Path,
    texts: str | Path | Sequence[str] = BANK,
    *,
    tasks: Sequence[str] | None = None,
    sites: Sequence[str] | None = None,
    top: int = 10,
    clip: str | None = None,
    plot: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Callable[[str], None] = lambda name: None,
) -> list[Interpretation]:
    """Decode tasks' singular vectors at some sites as texts.

    Args:
        bundle: the bundle's folder.
        texts: the bank: texts, or the path of a file with one text per line; a built-in one by default.
        tasks: which tasks; all by default.
        sites: which sites; by default the MLP whose input lies four fifths into the network, or what else all tasks change.
        top: how many texts for each task and site.
        clip: for image models, a CLIP model (folder or hub id) with visual projection and text tower; the bundle's own
            source by default.
        plot: draw the texts and their shares to this file (.png, .svg or .pdf).
        device: as in `load`.
        dtype: as in `load`.
        progress: called with the name of each step.

    Raises:
        InputError: no such task or site, a bank with fewer texts than `top`, or an image model without a text tower.
    """
    if plot is not None:
        refuse_other_format(Path(plot))
    if isinstance(texts, str | Path):
        named, bank = str(texts), read_bank(Path(texts))
    else:
        named, bank = "the bank", list(dict.fromkeys(texts))
    if top < 1 or len(bank) < top:
        raise InputError(
            f"{named}: has {len(bank)} texts, but {top} are requested. Use a larger bank, or request fewer "
            "(`top=`, `--top`)."
        )
    model = load(bundle, device=device, dtype=dtype, check=True)
    model.core.positions(tasks)
    names = model.tasks if tasks is None else list(tasks)
    chosen = choose_sites(model.sites, list(sites)) if sites else [_late_site(model, names)]
    vectors = {(name, site.name): _vectors(model, name, site) for name in names for site in chosen}
    space: TextSpace = ClipSpace(model, clip) if model.takes_images else StreamSpace(model)
    placed = space.place(bank, chosen, progress)
    found = [
        Interpretation(name, site, _decode(space.project(rows), placed[site], bank, top))
        for (name, site), rows in vectors.items()
    ]
    if plot is not None:
        save_plot(found, Path(plot))
    return found


def _late_site(model: Model, tasks: list[str]) -> Site:
    """The MLP input nearest to the paper's depth that every task changes; another site where there is none."""
    positions = [model.tasks.index(task) for task in tasks]
    changed = [
        site
        for site in model.sites
        if all(any(model.sets.tensors.changes(i, name) for name in site.tensors) for i in positions)
    ]
    sites = changed or model.sites
    candidates = [site for site in sites if site.name.startswith("M") and site.name[1:].isdigit()] or sites
    return min(candidates, key=lambda site: abs(site.depth - _DEPTH))


def _vectors(model: Model, task: str, site: Site) -> Tensor:
    """`diag(s) V` (k, width) of a task's deltas at a site, stacked and factored together where several layers read it."""
    index = model.tasks.index(task)
    found = [f for name in site.tensors if (f := model.sets.tensors.factors(index, name)) is not None]
    if not found:
        raise InputError(f"task {task}: changes nothing at {site.name}. Choose another site.")
    rows = torch.cat([f.s[:, None] * f.v for f in found]).cpu().float()
    if len(found) == 1:
        return rows
    _, s, v = torch.linalg.svd(rows, full_matrices=False)
    return (s[:, None] * v)[: max(f.rank for f in found)]


def _decode(vectors: Tensor, placed: Tensor, bank: list[str], top: int) -> list[DecodedText]:
    return [DecodedText(bank[pick.position], pick.score, pick.share) for pick in text_span(vectors, placed, top)]
