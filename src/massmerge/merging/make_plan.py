"""From opened sources to a plan: which tensors the experts change, their ranks, and what all of it weighs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from massmerge.checkpoints import Expert
from massmerge.checkpoints.adapters import AdapterExpert
from massmerge.checkpoints.skeleton import Slot
from massmerge.errors import Problem
from massmerge.io.tensor_file import TensorInfo, header_bytes
from massmerge.merging.changed import changed_by, weights_at_hand
from massmerge.merging.from_bundle import BundledExpert
from massmerge.merging.plan import Plan, Sizes, TaskPlan, TensorPlan, merge_seconds, peak_memory
from massmerge.merging.ranks import MatrixSize, core_bytes, factor_bytes, ranks_by_budget, ranks_by_rule, too_small
from massmerge.recipe import Recipe

if TYPE_CHECKING:
    from massmerge.merging.prepare import Prepared


def touched_by(prepared: Prepared, expert: Expert) -> set[str]:
    """The tensors that an expert changes; all that it may change where they are not known or make no difference.

    Raises:
        InputError: a tensor cannot be read.
    """
    # A static merge shares out no bytes, and a bundle knows what its tasks change.
    given = prepared.recipe.merge.static or isinstance(expert, BundledExpert)
    return changed_by(prepared.base, expert) if not given and weights_at_hand(prepared.base, expert) else expert.names()


def _ranks_known(prepared: Prepared) -> bool:
    """Whether ranks will be those of the plan: they do not depend on weights that were not read."""
    experts = [e for e in prepared.experts.values() if not isinstance(e, BundledExpert)]
    known = prepared.recipe.merge.static or all(weights_at_hand(prepared.base, expert) for expert in experts)
    return known and not isinstance(prepared.recipe.merge.rank, float)


def plan_merge(prepared: Prepared, touched: dict[str, set[str]], problems: list[Problem], workers: int) -> Plan:
    """What a merge will do, by the tensors that each task changes; problems with ranks are added to the others."""
    recipe, base = prepared.recipe, prepared.base
    order = [task.name for task in recipe.tasks if task.name in prepared.experts]
    sizes_of = _matrix_sizes(prepared, order, touched)
    whole = _whole_tensors(prepared, order, touched)
    fixed = recipe.router.first_pass == "fixed" and not recipe.merge.static
    base_bytes = _file_bytes({name: base.info(name) for name in sorted(base.slots)})
    whole_bytes = sum(t.nbytes * sum(t.ranks) + _entry_bytes(t.name) * sum(t.ranks) for t in whole)
    rest = _rest_bytes(prepared, sizes_of)
    ranks = _ranks(recipe, sizes_of, base_bytes, whole_bytes + rest, fixed, problems)
    matrices = [
        TensorPlan(
            x.name,
            base.slots[x.name].kind,
            base.slots[x.name].shape,
            _dtype(base.info(x.name)),
            (x.m, x.n),
            ranks[x.name],
        )
        for x in sizes_of
    ]
    factors = {t: sum(factor_bytes(x, ranks[x.name][i]) for x in sizes_of) for i, t in enumerate(order)}
    cores = sum(core_bytes(x, ranks[x.name]) for x in sizes_of) if fixed else 0
    head_bytes = sum(head.nbytes for head in (*prepared.heads.values(), prepared.base_head) if head is not None)
    sizes = Sizes(base_bytes, sum(factors.values()), whole_bytes, cores, rest, head_bytes)
    if recipe.merge.static:
        copies = len(order) if recipe.merge.keeps_tasks else 1
        sizes = Sizes(base_bytes, 0, (copies - 1) * base_bytes, 0, rest, head_bytes)
    elif recipe.merge.budget is not None and sizes.counted > recipe.merge.budget * base_bytes:
        problems.append(
            Problem(
                "budget",
                f"is too small: with rank 1 everywhere the bundle is {sizes.ratio:.2f} times the base, the "
                f"budget is {recipe.merge.budget}. Raise it, or merge fewer tasks.",
                "warning",
            )
        )
    apart = not recipe.merge.static or recipe.merge.method == "tsv_c"  # what is stored, or would be, for each task
    tasks = tuple(
        _task_plan(
            prepared, name, base_bytes, apart * factors[name], apart * sum(t.nbytes for t in whole if t.ranks[i])
        )
        for i, name in enumerate(order)
    )
    return Plan(
        recipe.merge.method,
        recipe.base,
        base.skeleton.class_name,
        base.source.revision,
        tasks,
        (*matrices, *whole),
        sizes,
        _ranks_known(prepared),
        peak_memory(matrices, whole, workers),
        merge_seconds(matrices, sizes, workers),
        tuple(problems),
        tuple(task.name for task in recipe.tasks if task.name not in prepared.experts),
    )


def _is_factored(prepared: Prepared, slot: Slot) -> bool:
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


def _matrix_sizes(prepared: Prepared, order: list[str], touched: dict[str, set[str]]) -> list[MatrixSize]:
    sizes = []
    for name, slot in sorted(prepared.base.slots.items()):
        if slot.matrix is None or not _is_factored(prepared, slot):
            continue
        full = min(slot.matrix)
        known = {t: prepared.experts[t].rank_limit(name) for t in order if name in touched[t]}
        limits = tuple((known[t] or full) if t in known else 0 for t in order)
        if any(limits):
            sizes.append(MatrixSize(name, *slot.matrix, prepared.base.info(name).dtype.itemsize, limits))
    return sizes


def _whole_tensors(prepared: Prepared, order: list[str], touched: dict[str, set[str]]) -> list[TensorPlan]:
    """Tensors without factors: norms, biases, tokens, matrices smaller than the number of tasks, what only experts have."""
    base, tensors = prepared.base, []
    for name, slot in sorted(base.skeleton.slots.items()):
        flags = tuple(int(name in touched[t]) for t in order)
        if not any(flags) or _is_factored(prepared, slot):
            continue
        first = next(iter(base.readings.values())).info
        dtype = _dtype(base.info(name) if name in base.readings else first)
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


def _task_plan(prepared: Prepared, name: str, base_bytes: int, factors: int, whole: int) -> TaskPlan:
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
        _apart_bytes(expert, base_bytes, factors + whole),
    )


def _apart_bytes(expert: Expert, base_bytes: int, stored: int) -> int:
    """Bytes of an expert by itself; of an adapter that a bundle gives, as much as is stored of it."""
    if expert.form == "full":
        return base_bytes
    if not isinstance(expert, AdapterExpert):
        return stored
    head = expert.head.readings.values() if expert.head else ()
    return sum(info.nbytes for info in expert.store.infos.values()) - sum(reading.info.nbytes for reading in head)


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")


def _entry_bytes(name: str) -> int:
    return len(json.dumps(name)) + 96


def _file_bytes(infos: dict[str, TensorInfo]) -> int:
    """Size of a safetensors file with these tensors."""
    return len(header_bytes(infos)) + sum(info.nbytes for info in infos.values())


def _rest_bytes(prepared: Prepared, matrices: list[MatrixSize]) -> int:
    """An upper bound for everything small: manifest with its checksums, statistics, card, recipe, configuration."""
    tasks, names = len(prepared.recipe.tasks), sum(len(x.name) for x in matrices)
    recipe = len(prepared.recipe.dump().encode())
    manifest = 4096 + 1200 * tasks + names + len(matrices) * (16 + 6 * tasks)
    statistics = 1024 + 4 * len(matrices) * (tasks * tasks + 3 * tasks)
    card = 2048 + 100 * tasks + 2 * recipe
    config = len(prepared.base.skeleton.config.to_json_string(use_diff=False).encode())
    files = sum(path.stat().st_size for path in prepared.processor.values())
    return manifest + statistics + card + recipe + config + files
