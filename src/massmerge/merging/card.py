"""The README of what a merge wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from massmerge.bundle.layout import STATIC_RECIPE
from massmerge.checkpoints.backbone import auto_class
from massmerge.merging.open_recipe import OpenedRecipe

_PAPER = "MASS: MoErging through Adaptive Subspace Selection (ICLR 2026)"


def bundle_card(prepared: OpenedRecipe, ranks: Mapping[str, Sequence[int]]) -> str:
    """The card of a bundle: what it is, its tasks, how to use it, the recipe."""
    plan = prepared.plan
    rows = []
    for i, task in enumerate(plan.tasks):
        used = [r[i] for r in ranks.values() if r[i]]
        span = f"{min(used)} to {max(used)}" if used else "none"
        labels = len(task.labels) if task.labels else "none"
        size = (task.factor_bytes + task.whole_bytes) / 1e6
        rows.append(f"| {task.name} | {task.source} | {task.form} | {labels} | {span} | {size:.1f} MB |")
    return "\n".join(
        [
            _front_matter(prepared),
            f"# {len(plan.tasks)} tasks on one {plan.base_class}",
            "",
            f"A bundle of `{plan.base}` and {len(plan.tasks)} experts of it, made by massmerge after the paper *{_PAPER}*.",
            "It takes an input without a task name, finds the task and answers (task, label, score).",
            "",
            "| task | expert | form | labels | ranks | size |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "```bash",
            "mass predict . INPUT…   # text or image files, without a task name",
            "mass explain . INPUT    # why it is answered so",
            "mass inspect .          # sizes, ranks, kept energy, similarity of the tasks",
            "mass verify .           # checksums",
            "```",
            "",
            "`recipe.yaml` beside this file is what it was made from.",
            "",
        ]
    )


def checkpoint_card(prepared: OpenedRecipe) -> str:
    """The card of a static merge."""
    plan = prepared.plan
    apart = prepared.recipe.merge.keeps_tasks
    opener = auto_class(plan.base_class)
    what = f"One {plan.base_class}" + ("" if prepared.base.writes else " without a head")
    if apart:
        what += " for each task"
    elif not prepared.base.writes:
        what += ", the tasks' heads in `heads/`"
    return "\n".join(
        [
            _front_matter(prepared),
            f"# {plan.method} of {len(plan.tasks)} experts of {plan.base}",
            "",
            f"{what}, merged by massmerge with the method `{plan.method}` from:",
            "",
            *(f"- {task.name}: `{task.source}`" for task in plan.tasks),
            "",
            "```python",
            f"from transformers import {opener}",
            "",
            f'model = {opener}.from_pretrained("{plan.tasks[0].name if apart else "."}")',
            "```",
            "",
            f"`{STATIC_RECIPE}` beside this file is what it was made from.",
            "",
        ]
    )


def _front_matter(prepared: OpenedRecipe) -> str:
    data = {
        "library_name": "massmerge" if prepared.plan.method == "mass" else "transformers",
        "base_model": [prepared.plan.base, *(task.source for task in prepared.plan.tasks)],
        "base_model_relation": "merge",
        "tags": ["massmerge", "model-merging", prepared.plan.method],
    }
    return "---\n" + yaml.safe_dump(data, sort_keys=False) + "---\n"
