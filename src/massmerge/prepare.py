"""Opens everything that a recipe names and plans its merge, from headers and configurations alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from massmerge.bundled import Bundled
from massmerge.checkpoints import (
    PROCESSOR_FILES,
    Base,
    Expert,
    Source,
    find_source,
    is_adapter,
    narrow,
    open_base,
)
from massmerge.checkpoints.experts import task_skeleton
from massmerge.checkpoints.open_clip import OpenClipStore
from massmerge.checkpoints.towers import has_towers, vision_tower
from massmerge.errors import InputError, Problem, problems_error
from massmerge.heads import HeadSource, find_base_head
from massmerge.heads.text import TextTower
from massmerge.opened_tasks import Attempts, all_write, open_tasks, with_outputs
from massmerge.plan import Plan, Sizes, TaskPlan, TensorPlan, merge_seconds, peak_memory
from massmerge.ranks import MatrixSize, core_bytes, factor_bytes, ranks_by_budget, ranks_by_rule
from massmerge.recipe import Recipe, TaskRecipe, TextHead
from massmerge.routing.sites import choose_sites, find_sites
from massmerge.tensorfile import TensorInfo, header_bytes


@dataclass
class Prepared:
    """A plan with the opened sources that it was made from."""

    recipe: Recipe
    folder: Path
    base: Base
    experts: dict[str, Expert]
    heads: dict[str, HeadSource]
    processor: dict[str, Path]
    base_head: HeadSource | None
    """The base's language head, where a task has none of its own."""
    bundled: Bundled | None = None
    """The bundle that base and some of the tasks are taken from."""
    plan: Plan = field(init=False)

    @property
    def opened(self) -> list[TaskRecipe]:
        """The tasks whose own sources are opened: all that no bundle gives."""
        return tasks_besides(self.recipe, self.bundled)


def tasks_besides(recipe: Recipe, bundled: Bundled | None) -> list[TaskRecipe]:
    """The tasks of a recipe that a bundle does not give."""
    return [task for task in recipe.tasks if bundled is None or task.name not in bundled.names]


def make_plan(recipe: Recipe | str | Path, folder: str | Path | None = None) -> Plan:
    """What a merge of this recipe would do; reads configurations and headers only.

    Args:
        recipe: a recipe, or the path of one.
        folder: what relative paths in the recipe start from; the recipe's own folder if a path is given.

    Raises:
        InputError: the recipe cannot be read, or its base cannot be opened. Whatever else is wrong stands in
            `Plan.problems`.
    """
    return prepare(*recipe_and_folder(recipe, folder), download=False).plan


def recipe_and_folder(recipe: Recipe | str | Path, folder: str | Path | None) -> tuple[Recipe, Path]:
    """A recipe given as an object or as a path, with the folder that its own paths are relative to."""
    if isinstance(recipe, Recipe):
        return recipe, Path(folder or ".")
    return Recipe.load(recipe), Path(folder) if folder is not None else Path(recipe).resolve().parent


def prepare(
    recipe: Recipe, folder: Path, *, download: bool, workers: int = 2, bundled: Bundled | None = None
) -> Prepared:
    """Open every source of a recipe and plan its merge, collecting problems instead of stopping at the first.

    Args:
        recipe: what to merge.
        folder: what its relative paths start from.
        download: whether weights are fetched from a hub, or only headers.
        workers: how many tensors will be worked on at once.
        bundled: a bundle that gives the base and the tasks it names; sources of the other tasks alone are opened.
    """
    attempt, tasks = Attempts(), tasks_besides(recipe, bundled)
    sources = {
        task.name: attempt(f"task {task.name}", partial(find_source, task.expert, folder, download=download))
        for task in tasks
    }
    base = attempt(
        "base",
        bundled.open_base if bundled else lambda: open_base(find_source(recipe.base, folder, download=download)),
    )
    if base is None:
        raise problems_error(attempt.problems)
    tower = _text_tower(recipe, tasks, folder, None if bundled else base, attempt, download=download)
    if bundled is None:
        base = _narrowed(base, [s for s in sources.values() if s is not None], image=tower is not None)
    given = [(task, source) for task in tasks if (source := sources[task.name]) is not None]
    opened = open_tasks(given, base, folder, tower)
    if recipe.merge.static and all_write(base, tasks, opened):
        base, opened = with_outputs(base, opened, partial(open_tasks, given, folder=folder, tower=tower))
    experts, heads = opened.experts, opened.heads
    attempt.problems += opened.problems
    if bundled is not None:
        experts, heads = {**bundled.experts(), **experts}, {**bundled.heads(), **heads}
        attempt.problems += bundled.problems(heads)
        processor, base_head = bundled.processor(), attempt("base", partial(bundled.base_head, heads))
    else:
        files = attempt("processor", lambda: _processor_files(recipe, folder, base.source, download=download))
        processor, base_head = files or {}, find_base_head(base, heads.values())
    attempt.problems += _label_problems(recipe, heads)
    attempt("router.site", partial(_check_sites, recipe, base))
    prepared = Prepared(recipe, folder, base, experts, heads, processor, base_head, bundled)
    prepared.plan = _plan(prepared, attempt.problems, workers)
    return prepared


def _text_tower(
    recipe: Recipe,
    tasks: list[TaskRecipe],
    folder: Path,
    base: Base | None,
    attempt: Attempts,
    *,
    download: bool,
) -> TextTower | None:
    """The base's text tower, if a head is made of texts; its tokenizer is the processor's, else the base's.

    A bundle keeps the vision tower alone, so for its new tasks the base is opened where the recipe says.
    """
    if not any(isinstance(task.head, TextHead) for task in tasks):
        return None
    if base is None:
        base = open_base(find_source(recipe.base, folder, download=download))
    vision_tower(base)  # refuses a base that has no towers
    if recipe.processor is None:
        return TextTower(base, base.source)
    named = recipe.processor
    return TextTower(base, attempt("processor", lambda: find_source(named, folder, download=download)) or base.source)


def _narrowed(base: Base, sources: list[Source], *, image: bool) -> Base:
    """The part of the base that the experts are versions of; what does not fit is told when the expert is opened."""
    if has_towers(base) and (image or isinstance(base.store, OpenClipStore)):
        return narrow(base, vision_tower(base))
    for source in sources:
        if not is_adapter(source):
            try:
                return narrow(base, task_skeleton(source, base)[0])
            except InputError:
                continue
    return base


def _processor_files(recipe: Recipe, folder: Path, base: Source, *, download: bool) -> dict[str, Path]:
    """The files of the tokenizer or image processor."""
    source = base if recipe.processor is None else find_source(recipe.processor, folder, download=download)
    files = {name: path for name in PROCESSOR_FILES if (path := source.file(name)) is not None}
    if recipe.processor is not None and not files:
        raise InputError(f"{recipe.processor}: no tokenizer or image processor in it.")
    return files


def _check_sites(recipe: Recipe, base: Base) -> None:
    """Refuse a site that the base does not have. Found by a forward pass of the skeleton, which some models cannot do."""
    if recipe.router.site == "auto" or recipe.merge.static:
        return
    try:
        sites = find_sites(base.skeleton.model.eval())
    except (RuntimeError, NotImplementedError):
        return
    choose_sites(sites, recipe.router.site)


def _label_problems(recipe: Recipe, heads: dict[str, HeadSource]) -> list[Problem]:
    """Shared labels that no task has."""
    known = {f"{task}/{label}" for task, head in heads.items() for label in head.labels or ()}
    complete = len(heads) == len(recipe.tasks)
    return [
        Problem("shared_labels", f"{name!r} is no label of a task; write task/label.")
        for group in recipe.shared_labels
        for name in group
        if complete and name not in known
    ]


def _plan(prepared: Prepared, problems: list[Problem], workers: int) -> Plan:
    recipe, base = prepared.recipe, prepared.base
    order = [task.name for task in recipe.tasks]
    touched = {name: prepared.experts[name].names() if name in prepared.experts else set() for name in order}
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
                f"cannot be held: rank 1 everywhere and what is stored whole weigh {sizes.ratio:.2f} times the base, the "
                f"budget is {recipe.merge.budget}. Raise it, or merge fewer tasks.",
                "warning",
            )
        )
    apart = not recipe.merge.static or recipe.merge.method == "tsv_c"  # what is stored, or would be, for each task
    tasks = tuple(
        _task_plan(prepared, name, apart * factors[name], apart * sum(t.nbytes for t in whole if t.ranks[i]))
        for i, name in enumerate(order)
        if name in prepared.experts
    )
    return Plan(
        recipe.merge.method,
        recipe.base,
        base.skeleton.class_name,
        base.source.revision,
        tasks,
        (*matrices, *whole),
        sizes,
        not isinstance(recipe.merge.rank, float),
        peak_memory(matrices, whole, workers),
        merge_seconds(matrices, sizes, workers),
        tuple(problems),
    )


def _matrix_sizes(prepared: Prepared, order: list[str], touched: dict[str, set[str]]) -> list[MatrixSize]:
    sizes = []
    for name, slot in sorted(prepared.base.slots.items()):
        if slot.matrix is None or not prepared.base.info(name).dtype.is_floating_point:
            continue
        full = min(slot.matrix)
        known = {t: prepared.experts[t].rank_limit(name) for t in order if name in touched[t]}
        limits = tuple((known[t] or full) if t in known else 0 for t in order)
        if any(limits):
            sizes.append(MatrixSize(name, *slot.matrix, prepared.base.info(name).dtype.itemsize, limits))
    return sizes


def _whole_tensors(prepared: Prepared, order: list[str], touched: dict[str, set[str]]) -> list[TensorPlan]:
    """Tensors without factors: norms, biases, tokens, and those that only experts have."""
    base, tensors = prepared.base, []
    for name, slot in sorted(base.skeleton.slots.items()):
        flags = tuple(int(name in touched[t]) for t in order)
        floating = name in base.readings and base.info(name).dtype.is_floating_point
        if not any(flags) or (slot.matrix is not None and floating):
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


def _task_plan(prepared: Prepared, name: str, factors: int, whole: int) -> TaskPlan:
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
    )


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
