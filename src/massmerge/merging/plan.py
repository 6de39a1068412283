"""What a merge will do: which tensors the experts change, their ranks, and what all of it weighs and takes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from massmerge.bundle.base import LARGE
from massmerge.bundle.encoding import stored_type
from massmerge.checkpoints import Expert
from massmerge.checkpoints.skeleton import Kind, Slot
from massmerge.errors import Problem
from massmerge.merging.costs import (
    entry_bytes,
    entrywise_seconds,
    file_bytes,
    merge_seconds,
    peak_memory,
    rest_bytes,
)
from massmerge.merging.ranks import MatrixSize, core_bytes, factor_bytes, ranks_by_budget, ranks_by_rule, too_small
from massmerge.merging.static import STATIC_METHODS
from massmerge.recipe import Recipe

if TYPE_CHECKING:
    from massmerge.merging.open_recipe import OpenedRecipe


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the backbone: whether it gets factors, and of which ranks."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    matrix: tuple[int, int] | None
    """Rows and columns of the factored matrix; none for a tensor that is stored whole where it differs."""
    ranks: tuple[int, ...]
    """Rank for each task in order, 0 where the task does not touch it; for a tensor stored whole, 1 where it does."""
    in_base: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True)
class TaskPlan:
    """One task: where it comes from and what of it goes into the bundle."""

    name: str
    source: str
    revision: str | None
    form: str
    """`full` for a checkpoint, `adapter` for LoRA."""
    labels: tuple[str, ...] | None
    head: str
    """Class that runs the head, `linear`, or `none`."""
    factor_bytes: int
    whole_bytes: int
    head_bytes: int
    apart_bytes: int = 0
    """What the expert weighs by itself, without its head: a full one as much as the base."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of what is written."""

    base: int
    factors: int
    whole: int
    fixed: int
    rest: int
    """Manifest, statistics, card, recipe, processor, configuration."""
    heads: int

    @property
    def counted(self) -> int:
        """All but the heads: what the budget speaks of."""
        return self.base + self.factors + self.whole + self.fixed + self.rest

    @property
    def ratio(self) -> float:
        """All but the heads, as a multiple of the base."""
        return self.counted / self.base


@dataclass(frozen=True)
class Plan:
    """What a merge will do."""

    method: str
    base: str
    base_class: str
    base_revision: str | None
    tasks: tuple[TaskPlan, ...]
    tensors: tuple[TensorPlan, ...]
    sizes: Sizes
    ranks_exact: bool
    """False where ranks depend on weights that were not read: by a share of energy, or not downloaded yet."""
    peak_memory: int
    seconds: float
    problems: tuple[Problem, ...]
    left_out: tuple[str, ...] = ()
    """Tasks whose experts could not be opened; no figure speaks of them."""

    @property
    def matrices(self) -> list[TensorPlan]:
        """The tensors that get factors."""
        return [t for t in self.tensors if t.matrix is not None]

    @property
    def errors(self) -> list[Problem]:
        """Problems that forbid the merge."""
        return [p for p in self.problems if p.level == "error"]

    @property
    def apart(self) -> int:
        """Bytes of the experts as they are, heads not counted; adapters need the base beside them."""
        adapters = any(task.form == "adapter" for task in self.tasks)
        return sum(task.apart_bytes for task in self.tasks) + self.sizes.base * adapters

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, for `--json` and for comparing two plans."""
        data = asdict(self)
        data["sizes"] |= {"counted": self.sizes.counted, "ratio": round(self.sizes.ratio, 4), "apart": self.apart}
        return json.loads(json.dumps(data))


def copies_base(recipe: Recipe, nbytes: int) -> bool:
    """Whether what a merge writes holds the base's weights, or says where they lie."""
    said = recipe.merge.base
    return recipe.merge.static or said == "copy" or (said == "auto" and nbytes <= LARGE)


def touched_by(prepared: OpenedRecipe, expert: Expert) -> set[str]:
    """The tensors that an expert changes; all that it may change where they are not known or make no difference.

    Raises:
        InputError: a tensor cannot be read.
    """
    names = expert.names()
    if prepared.recipe.merge.static or not _at_hand(prepared, expert):  # a static merge shares out no bytes
        return names
    # Of sources in stores each look is a request, which waits longer than it works.
    with ThreadPoolExecutor(16 if expert.source.weights else 1) as pool:
        changed = pool.map(lambda name: expert.changes(name, prepared.base), ordered := sorted(names))
        return {name for name, differs in zip(ordered, changed, strict=True) if differs}


def _at_hand(prepared: OpenedRecipe, expert: Expert) -> bool:
    return prepared.base.source.at_hand and expert.at_hand


def _ranks_known(prepared: OpenedRecipe) -> bool:
    """Whether ranks will be those of the plan: they do not depend on weights that were not read."""
    known = prepared.recipe.merge.static or all(_at_hand(prepared, expert) for expert in prepared.experts.values())
    return known and not isinstance(prepared.recipe.merge.rank, float)


def plan_merge(prepared: OpenedRecipe, touched: dict[str, set[str]], problems: list[Problem], workers: int) -> Plan:
    """What a merge will do, by the tensors that each task changes; problems with ranks are added to the others."""
    recipe, base = prepared.recipe, prepared.base
    order = [task.name for task in recipe.tasks if task.name in prepared.experts]
    sizes_of = _matrix_sizes(prepared, order, touched)
    whole = _whole_tensors(prepared, order, touched)
    fixed = recipe.router.first_pass == "fixed" and not recipe.merge.static
    base_bytes = file_bytes({name: base.info(name) for name in sorted(base.slots)})
    whole_bytes = sum(t.nbytes * sum(t.ranks) + entry_bytes(t.name) * sum(t.ranks) for t in whole)
    rest = rest_bytes(prepared, sizes_of)
    ranks = _ranks(recipe, sizes_of, base_bytes, whole_bytes + rest, fixed, problems)
    matrices = [_matrix_plan(prepared, x, ranks[x.name]) for x in sizes_of]
    limits = {x.name: x.limits for x in sizes_of}
    factors = {t: sum(factor_bytes(x, ranks[x.name][i]) for x in sizes_of) for i, t in enumerate(order)}
    if recipe.merge.static:
        copies = len(order) if recipe.merge.keeps_tasks else 1
        sizes = Sizes(base_bytes, 0, (copies - 1) * base_bytes, 0, rest, _head_bytes(prepared))
    else:
        cores = sum(core_bytes(x, ranks[x.name]) for x in sizes_of) if fixed else 0
        sizes = Sizes(base_bytes, sum(factors.values()), whole_bytes, cores, rest, _head_bytes(prepared))
        problems += _budget_problems(sizes, recipe.merge.budget)
    apart = not recipe.merge.static or recipe.merge.method == "tsv_c"  # what is stored, or would be, for each task
    whole_of = [sum(t.nbytes for t in whole if t.ranks[i]) for i in range(len(order))]
    return Plan(
        recipe.merge.method,
        recipe.base,
        base.skeleton.class_name,
        base.source.revision,
        tuple(
            _task_plan(prepared, t, base_bytes, apart * factors[t], apart * whole_of[i]) for i, t in enumerate(order)
        ),
        (*matrices, *whole),
        sizes,
        _ranks_known(prepared),
        peak_memory(matrices, whole, limits, workers),
        _seconds(recipe, matrices, whole, limits, sizes, workers),
        tuple(problems),
        tuple(task.name for task in recipe.tasks if task.name not in prepared.experts),
    )


def _matrix_plan(prepared: OpenedRecipe, size: MatrixSize, ranks: tuple[int, ...]) -> TensorPlan:
    """A tensor of the base that gets factors of these ranks."""
    slot, dtype = prepared.base.slots[size.name], prepared.base.info(size.name).dtype
    return TensorPlan(size.name, slot.kind, slot.shape, _dtype(dtype), (size.m, size.n), ranks)


def _head_bytes(prepared: OpenedRecipe) -> int:
    """Bytes of all heads."""
    further = [head for own in prepared.further.values() for head in own.values()]
    heads = (*prepared.heads.values(), *further, prepared.base_head)
    return sum(head.nbytes for head in heads if head is not None)


def _budget_problems(sizes: Sizes, budget: float | None) -> Iterator[Problem]:
    """A budget that no ranks meet."""
    if budget is not None and sizes.counted > budget * sizes.base:
        yield Problem(
            "budget",
            f"is too small: with rank 1 everywhere the bundle is {sizes.ratio:.2f} times the base, the "
            f"budget is {budget}. Raise it, or merge fewer tasks.",
            "warning",
        )


def _seconds(
    recipe: Recipe,
    matrices: list[TensorPlan],
    whole: list[TensorPlan],
    limits: dict[str, tuple[int, ...]],
    sizes: Sizes,
    workers: int,
) -> float:
    """What the merge takes, by what its method does with a tensor."""
    method = STATIC_METHODS.get(recipe.merge.method)
    if method is not None and method.elementwise:
        return entrywise_seconds([*matrices, *whole], sizes, len(method.rounds), workers)
    return merge_seconds(matrices, limits, sizes, workers, base_read=copies_base(recipe, sizes.base))


def _is_factored(prepared: OpenedRecipe, slot: Slot) -> bool:
    """Whether a tensor gets factors.

    What a bundle keeps whole stays whole, also where there are fewer tasks now; what it has cut off cannot be made whole.
    """
    base, options = prepared.base, prepared.recipe.merge
    if slot.matrix is None or slot.name not in base.readings or not base.info(slot.name).dtype.is_floating_point:
        return False
    if prepared.bundled is not None:
        bundle, full = prepared.bundled.bundle, min(slot.matrix)
        if any(slot.name in header for header in bundle.headers.values()):
            return False
        if any(0 < rank < full for rank in bundle.ranks.get(slot.name, ())):
            return True
    cut = options.rank is not None or options.budget is not None
    return not (cut and too_small(slot.matrix, len(prepared.experts)))


def _matrix_sizes(prepared: OpenedRecipe, order: list[str], touched: dict[str, set[str]]) -> list[MatrixSize]:
    sizes = []
    for name, slot in sorted(prepared.base.slots.items()):
        if slot.matrix is None or not _is_factored(prepared, slot):
            continue
        full = min(slot.matrix)
        known = {t: prepared.experts[t].rank_limit(name) for t in order if name in touched[t]}
        limits = tuple((known[t] or full) if t in known else 0 for t in order)
        if any(limits):
            sizes.append(MatrixSize(name, *slot.matrix, _stored(prepared, name, slot.matrix), limits))
    return sizes


def _whole_tensors(prepared: OpenedRecipe, order: list[str], touched: dict[str, set[str]]) -> list[TensorPlan]:
    """Tensors without factors: norms, biases, tokens, matrices smaller than the number of tasks, what only experts have."""
    base, tensors = prepared.base, []
    for name, slot in sorted(base.skeleton.slots.items()):
        flags = tuple(int(name in touched[t]) for t in order)
        if not any(flags) or _is_factored(prepared, slot):
            continue
        dtype = _dtype(base.info(name).dtype if name in base.readings else base.dtype)
        tensors.append(TensorPlan(name, slot.kind, slot.shape, dtype, None, flags, name in base.readings))
    return tensors


def _ranks(
    recipe: Recipe, sizes: list[MatrixSize], base: int, taken: int, fixed: bool, problems: list[Problem]
) -> dict[str, tuple[int, ...]]:
    rule = recipe.merge.rank
    if rule is None and recipe.merge.static:
        return {x.name: x.limits for x in sizes}  # nothing is truncated
    if rule is None:
        assert recipe.merge.budget is not None
        return ranks_by_budget(sizes, int((recipe.merge.budget - 1) * base) - taken, fixed=fixed)
    largest = max(sizes, key=lambda x: min(x.m, x.n), default=None)
    if isinstance(rule, int) and largest is not None and rule > min(largest.m, largest.n):
        problems.append(
            Problem(
                "rank",
                f"{rule} is larger than every matrix: the largest, {largest.name}, is {largest.m}×{largest.n}. "
                f"Give at most {min(largest.m, largest.n)}.",
            )
        )
    return ranks_by_rule(sizes, rule)


def _task_plan(prepared: OpenedRecipe, name: str, base_bytes: int, factors: int, whole: int) -> TaskPlan:
    expert, head = prepared.experts[name], prepared.heads.get(name)
    return TaskPlan(
        name,
        expert.source.text,
        expert.source.revision,
        expert.form,
        head.labels if head else None,
        (head.class_name or head.kind) if head else "none",
        factors,
        whole,
        head.nbytes if head else 0,
        expert.apart_bytes(base_bytes, factors + whole),
    )


def _stored(prepared: OpenedRecipe, name: str, matrix: tuple[int, int]) -> torch.dtype:
    """The type of a matrix's factors."""
    return stored_type(prepared.recipe.merge.factors, prepared.base.info(name).dtype, matrix)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
