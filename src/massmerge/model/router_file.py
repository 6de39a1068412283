"""Puts a fitted router into a bundle: a new bundle that shares all other files takes the old one's place in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from massmerge.bundle.download import refuse_hub
from massmerge.bundle.kept_inputs import MOMENTS
from massmerge.bundle.layout import LEFT_OVER, MANIFEST, RECIPE, ROUTER
from massmerge.bundle.manifest import read_manifest, sign_manifest
from massmerge.bundle.merge_folder import recover
from massmerge.bundle.reader import Bundle
from massmerge.bundle.trim import keep_budget
from massmerge.bundle.watched_files import SourceFiles
from massmerge.bundle.work_folder import WorkFolder, in_words
from massmerge.errors import InputError, listing
from massmerge.io.checksums import file_sha256
from massmerge.io.durable import link_tree, write_text
from massmerge.io.tensor_file import read_tensors, write_tensors
from massmerge.model.route.voters import TYPICAL
from massmerge.routing.confidence import ConfidenceRule

_R = TypeVar("_R")
_SHARED = (MOMENTS, TYPICAL)  # what every calibration keeps anew, whatever the router


@dataclass(frozen=True)
class FittedRouter:
    """What is put into a bundle.

    Attributes:
        kind: of the router, which is the bundle's from then on.
        tensors: what it keeps, under names that begin with the kind; and what is kept besides.
        rule: the constants of its confidence; none for those that need no data.
        unknown: limits that take the place of the recipe's.
    """

    kind: str
    tensors: dict[str, Tensor]
    rule: ConfidenceRule | None = None
    unknown: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class BundleSize:
    """What a bundle weighs with its router.

    Attributes:
        ratio: all but the heads, as a multiple of the base.
        budget: the most that the recipe allows; none without a budget.
        dropped: the share of singular vectors that made room for the router.
    """

    ratio: float
    budget: float | None
    dropped: float

    @classmethod
    def kept(cls, folder: Path) -> BundleSize:
        """Of a bundle that is held to its budget, as far as few vectors suffice."""
        dropped = keep_budget(folder)
        bundle = Bundle(folder, check=False)
        return cls(bundle.counted_bytes / bundle.base_bytes, bundle.recipe.merge.budget, dropped)


def replace_router(
    path: str | Path, fit: Callable[[Path], tuple[_R, FittedRouter | None]]
) -> tuple[_R, BundleSize | None]:
    """Fit a router and put it into the bundle, while no other command writes the bundle.

    Args:
        path: the bundle.
        fit: gives what was found out, and what to put into the bundle; nothing leaves it as it is.

    Returns:
        What was found out, and what the bundle weighs now if it has changed.

    Raises:
        InputError: no bundle, or one of the hub's cache.
        MassError: another command is writing the bundle, it has changed meanwhile, or the disk is full.
    """
    refuse_hub(path)
    path = Path(path)
    recover(path)
    read_manifest(path)  # what is no bundle gets no folder beside it
    work = WorkFolder(path)
    with in_words(work.path), work.held():
        try:
            size = None
            found, fitted = SourceFiles.of_bundle(path).settled(lambda: fit(path))
            if fitted is not None:
                _refuse_no_numbers(path, fitted)
                result = work.fresh_result()
                _write(path, result, fitted)
                size = BundleSize.kept(result)
                work.publish(replacing=True)
        finally:
            work.discard()
    return found, size


def _refuse_no_numbers(path: Path, fitted: FittedRouter) -> None:
    broken = sorted(name for name, tensor in fitted.tensors.items() if not bool(tensor.isfinite().all()))
    if broken:
        raise InputError(
            f"{path}: what these inputs teach holds NaN or infinity, so the bundle stays as it is:{listing(broken, 5)}"
        )


def _write(path: Path, result: Path, fitted: FittedRouter) -> None:
    """The bundle at `path` with the router, in a folder of its own."""
    manifest, kind = read_manifest(path), fitted.kind
    again = (f"{kind}.", *(f"{part}." for part in _SHARED if any(n.startswith(f"{part}.") for n in fitted.tensors)))
    old = read_tensors(path / ROUTER) if ROUTER in manifest["files"] else ()
    kept = {name: tensor for name, tensor in old if not name.startswith(again)}
    changed = [ROUTER, *([RECIPE] if fitted.unknown else [])]
    link_tree(path, result, leave_out=(MANIFEST, *changed, *LEFT_OVER))
    write_tensors(result / ROUTER, {**kept, **fitted.tensors})
    if fitted.unknown:
        recipe = Bundle(path, check=False).recipe
        unknown = recipe.unknown.model_copy(update=dict(fitted.unknown))
        write_text(result / RECIPE, recipe.model_copy(update={"unknown": unknown}).dump())
    entries = {n: {"bytes": (result / n).stat().st_size, "sha256": file_sha256(result / n)} for n in changed}
    rules = {k: rule for k, rule in manifest.get("confidence", {}).items() if k != kind}
    if fitted.rule is not None:
        rules[kind] = asdict(fitted.rule)
    said = {**manifest, "router_kind": kind, "files": {**manifest["files"], **entries}, "confidence": rules}
    sign_manifest(result, said if rules else {k: v for k, v in said.items() if k != "confidence"})
