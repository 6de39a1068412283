"""What a bundle holds: sizes, ranks, energy kept, similarity of its tasks, and what the redundancy filter left out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massmerge.bundle.factors import routing_rank
from massmerge.bundle.fitting import fitting_skeleton
from massmerge.bundle.layout import FIXED, ROUTER, factors_name
from massmerge.bundle.reader import Bundle, opened_in_words
from massmerge.errors import InputError
from massmerge.io.drawing import pyplot
from massmerge.recipe import FactorType, ProblemType
from massmerge.routing.projection import of_common_rank, site_basis
from massmerge.routing.separation import separation
from massmerge.routing.sites import Site, voting_sites

_PLOT_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class TaskReport:
    """One task of a bundle."""

    name: str
    source: str
    form: str
    head: str
    labels: tuple[str, ...] | None
    problem_type: ProblemType | None
    """What the outputs of its head mean, in Hugging Face's words."""
    rank_low: int
    rank_high: int
    energy: float
    """Share of the squared length of all its deltas that the factors hold."""
    nbytes: int
    """Factors and tensors stored whole, without the head."""
    left_out: tuple[str, ...]
    """Matrices at which the redundancy filter leaves the task out of the fixed model; none where there is no such model."""


@dataclass(frozen=True)
class Inspection:
    """What `mass inspect` shows."""

    path: str
    base: str
    base_class: str
    base_bytes: int
    factors: FactorType
    """How the factors' numbers are stored."""
    sizes: dict[str, int]
    ratio: float
    tasks: tuple[TaskReport, ...]
    blocks: dict[str, list[float]]
    """For each block of the network, the energy kept of each task; never NaN: 1 where a task changes nothing."""
    similarity: list[list[float]]
    """Cosines of the tasks' deltas, all factored matrices together."""
    overlap: list[list[float]] | None
    """Share of two tasks' routing subspaces that they have in common, the mean over voting sites. Tasks that
    share much are confused, whatever the cosine of their deltas. None where sites cannot be found without weights."""
    overlap_by_chance: float | None
    """What random subspaces of their sizes share, the mean over pairs."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


def inspect_bundle(bundle: Bundle | str | Path, *, plot: str | Path | None = None) -> Inspection:
    """Report what a bundle holds: sizes, ranks, energy kept, and how similar its tasks are.

    Only headers, small statistics and the factors at the voting sites are read.

    Args:
        bundle: the bundle, or its folder.
        plot: draw energy kept and similarity to this file (.png, .svg or .pdf).

    Raises:
        InputError: not a bundle, or the name of the plot ends otherwise.
    """
    bundle = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    with opened_in_words(bundle.path):
        report = _inspection(bundle)
    if plot is not None:
        plot_inspection(report, plot)
    return report


def _inspection(bundle: Bundle) -> Inspection:
    norm, energy = bundle.statistics["norm"].double(), bundle.statistics["energy"].double()
    accepted, names = bundle.statistics["accepted"].bool(), list(bundle.ranks)
    if FIXED not in bundle.manifest["files"]:
        accepted = torch.ones_like(accepted)
    squared = norm.square()
    tasks = []
    for i, task in enumerate(bundle.tasks):
        used = [ranks[i] for ranks in bundle.ranks.values() if ranks[i]]
        left = tuple(n for n, row, length in zip(names, accepted, norm, strict=True) if length[i] > 0 and not row[i])
        tasks.append(
            TaskReport(
                task.name, task.source, task.form, task.head, task.labels, task.problem_type, min(used, default=0),
                max(used, default=0), _share(energy[:, i], squared[:, i]), bundle.bytes_of(factors_name(task.name)),
                left,
            )
        )  # fmt: skip
    sizes = {
        "base": bundle.base_bytes,
        "factors and whole tensors": sum(t.nbytes for t in tasks),
        "fixed model": bundle.bytes_of(FIXED),
        "router": bundle.bytes_of(ROUTER),
        "heads": bundle.head_bytes,
    }
    sizes["everything else"] = bundle.counted_bytes - sum(sizes.values()) + sizes["heads"]
    base = bundle.manifest["base"]
    return Inspection(
        str(bundle.path), base["source"], base["class"], bundle.base_bytes, bundle.recipe.merge.factors, sizes,
        bundle.counted_bytes / bundle.base_bytes, tuple(tasks), _by_block(names, energy, squared),
        bundle.similarity.tolist(), *_overlap(bundle),
    )  # fmt: skip


def _share(energy: Tensor, squared: Tensor) -> float:
    total = float(squared.sum())
    return float((energy * squared).sum()) / total if total else 1.0


def block_of(name: str) -> str:
    """The numbered block that a tensor belongs to, such as `encoder.layer.3`; `outside blocks` for the others."""
    found = re.match(r"(.*?\.)?(\d+)(?=\.)", name)
    return found.group(0) if found else "outside blocks"


def _by_block(names: list[str], energy: Tensor, squared: Tensor) -> dict[str, list[float]]:
    def place(block: str) -> list[tuple[int, str]]:
        """What sorts blocks by their numbers."""
        return [(int(part), "") if part.isdigit() else (-1, part) for part in block.split(".")]

    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(block_of(name), []).append(row)
    return {
        block: [_share(energy[rows[block], i], squared[rows[block], i]) for i in range(energy.shape[1])]
        for block in sorted(rows, key=place)
    }


def _overlap(bundle: Bundle) -> tuple[list[list[float]] | None, float | None]:
    """How far the tasks' subspaces overlap where inputs are routed, and how far random ones would."""
    tasks = [task.name for task in bundle.tasks]
    sites = voting_sites(fitting_skeleton(bundle).model, bundle.recipe.router.site, bundle.ranks, len(tasks))
    if not sites:
        return None, None
    found = separation(
        [
            of_common_rank([_basis(bundle, task, site) for task in tasks], routing_rank(bundle, site.width))
            for site in sites
        ]
    )
    pairs = ~torch.eye(len(tasks), dtype=torch.bool)
    return found.overlap.tolist(), float(found.chance[pairs].mean()) if len(tasks) > 1 else None


def _basis(bundle: Bundle, task: str, site: Site) -> Tensor:
    """A task's orthonormal rows at a site."""
    found = [f for name in site.tensors if (f := bundle.factors(task, name)) is not None]
    return site_basis([(f.s, f.v) for f in found], max(f.rank for f in found)) if found else torch.zeros(0, site.width)


def cosine_text(value: float) -> str:
    """A cosine with two digits, without the sign of a zero."""
    return f"{value:.2f}".replace("-0.00", "0.00")


def plot_inspection(report: Inspection, path: str | Path) -> None:
    """Draw energy kept by task and block, and the similarity of the tasks.

    Raises:
        InputError: the file's name does not end in a format that can be drawn.
        MassError: matplotlib is missing.
    """
    if Path(path).suffix not in _PLOT_FORMATS:
        raise InputError(f"{path}: not a supported plot format. Use {', '.join(_PLOT_FORMATS)}.")
    plt = pyplot()
    names = [task.name for task in report.tasks]
    stacks = {block.rpartition(".")[0] for block in report.blocks} - {""}
    # A number is enough where there is one stack of blocks, not with an encoder and a decoder.
    blocks = [block.rpartition(".")[2] if len(stacks) == 1 else block for block in report.blocks]
    energy = torch.tensor(list(report.blocks.values())).mT * 100
    alike = report.similarity if report.overlap is None else report.overlap
    similarity = torch.tensor(alike).fill_diagonal_(torch.nan)  # a task is always like itself
    widths = 0.42 * len(blocks) + 1.2, 0.42 * len(names) + 1.2
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(sum(widths) + 2.6, 0.42 * len(names) + 2.4), width_ratios=widths, layout="constrained"
    )
    shown = left.imshow(energy, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    _label_cells(left, energy, lambda value: f"{value:.0f}", lambda value: "white" if value < 60 else "black")
    left.set_xticks(range(len(blocks)), blocks, rotation=90 if max(map(len, blocks)) > 3 else 0)
    left.set_yticks(range(len(names)), names)
    left.set_title("Energy kept, by block")
    figure.colorbar(shown, ax=left, label="% of the delta", pad=0.01)
    limit = max(0.5, float(similarity.nan_to_num().abs().max()))
    shown = right.imshow(similarity, vmin=-limit, vmax=limit, cmap="RdBu_r", aspect="auto")
    _label_cells(right, similarity, cosine_text, lambda v: "white" if abs(v) > 0.7 * limit else "black")
    right.set_facecolor("0.85")
    right.set_xticks(range(len(names)), names, rotation=90)
    right.set_yticks(range(len(names)), names)
    right.set_title("Similarity of the tasks")
    label = "cosine of the deltas" if report.overlap is None else "overlap of the routing subspaces"
    figure.colorbar(shown, ax=right, label=label, pad=0.01)
    figure.suptitle(f"{len(names)} tasks on {report.base}: {report.ratio:.2f} times the base")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _label_cells(axes: Any, values: Tensor, text: Callable[[float], str], colour: Callable[[float], str]) -> None:
    """Write each number into its cell."""
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            if not math.isnan(value):
                axes.text(j, i, text(value), ha="center", va="center", fontsize=7, color=colour(value))
