"""The README of what a merge wrote: a model card with the metadata that the hub asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from massmerge.bundle.layout import STATIC_RECIPE
from massmerge.checkpoints.backbone import auto_class
from massmerge.checkpoints.terms import Terms, terms_of, with_front_matter
from massmerge.io.hub import is_repository
from massmerge.merging.open_recipe import OpenedRecipe
from massmerge.merging.plan import TaskPlan

_PAPER = "MASS: MoErging through Adaptive Subspace Selection (ICLR 2026)"
_SHOWN_LABELS = 12


def terms_of_all(prepared: OpenedRecipe) -> tuple[Terms, dict[str, Terms]]:
    """Licences and languages of base and experts: by their cards, or by the bundle that they are taken from."""
    bundled = prepared.bundled
    said = bundled.bundle.manifest if bundled else {}
    base = Terms.of(said["base"]) if said else terms_of(prepared.base.source)
    tasks = {
        task["name"]: Terms.of(task) for task in said.get("tasks", ()) if bundled and task["name"] in bundled.names
    }
    tasks |= {task.name: terms_of(prepared.experts[task.name].source) for task in prepared.opened}
    return base, tasks


def bundle_card(prepared: OpenedRecipe, ranks: Mapping[str, Sequence[int]]) -> str:
    """The card of a bundle: what it is, how to use it, its tasks, its limits, where it comes from."""
    plan = prepared.plan
    rows = []
    for i, task in enumerate(plan.tasks):
        used = [r[i] for r in ranks.values() if r[i]]
        span = f"{min(used)} to {max(used)}" if used else "none"
        size = (task.factor_bytes + task.whole_bytes) / 1e6
        rows.append(f"| {task.name} | {_labels(task)} | {_named(task)} | {task.form} | {span} | {size:.1f} MB |")
    verb, given = ("generate", "prompt") if prepared.base.writes else ("predict", _input_of(prepared))
    base = plan.base if plan.base_revision else plan.base_class
    text = f"""# {len(plan.tasks)} tasks on one {plan.base_class}

A bundle of `{base}` and {len(plan.tasks)} experts of it, made by [massmerge](https://github.com/massmerge/massmerge)
after the paper *{_PAPER}*. It takes an input without a task
name, finds the task and answers {"with a text" if prepared.base.writes else "(task, label, score)"}.

## Use

```python
import massmerge as mm  # pip install massmerge

model = mm.load(".")
print(model.{verb}("{given}"))
```

On the command line: `mass {verb} . INPUT…`; `mass explain` shows why an input went where it went, `mass inspect` sizes
and ranks, `mass verify` compares checksums.

## Tasks

| task | labels | expert | form | ranks | size |
|---|---|---|---|---|---|
{_lines(rows)}
## Limits

- Inputs that belong to none of the tasks are answered too, unless `unknown:` in the recipe sets limits.
- Tasks whose inputs look alike are confused. Which ones, `mass eval BUNDLE SUITE --card` measures and writes into this card.

## Origin

`recipe.yaml` beside this file is what it was made from.
{_licences(prepared)}"""
    return with_front_matter(_metadata(prepared), text)


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
    base = plan.base if plan.base_revision else plan.base_class
    text = f"""# {plan.method} of {len(plan.tasks)} experts of {base}

{what}, merged by massmerge with the method `{plan.method}` from:

{_lines(f"- {task.name}: {_named(task)}" for task in plan.tasks)}
```python
from transformers import {opener}

model = {opener}.from_pretrained("{plan.tasks[0].name if apart else "."}")
```

`{STATIC_RECIPE}` beside this file is what it was made from.
{_licences(prepared)}"""
    return with_front_matter(_metadata(prepared), text)


def _metadata(prepared: OpenedRecipe) -> dict[str, Any]:
    """What the hub reads of a card. Only names of the hub are named there: a folder means nothing to others."""
    plan = prepared.plan
    named = [(plan.base, plan.base_revision), *((task.source, task.revision) for task in plan.tasks)]
    models = list(dict.fromkeys(text.partition("@")[0] for text, revision in named if revision))
    base, tasks = terms_of_all(prepared)
    licenses = sorted({terms.license for terms in (base, *tasks.values()) if terms.license})
    data = {
        "library_name": "massmerge" if plan.method == "mass" else "transformers",
        "pipeline_tag": _pipeline_tag(prepared),
        "license": licenses[0] if len(licenses) == 1 else "other" if licenses else None,
        "language": list(base.languages),
        "base_model": models,
        "base_model_relation": "merge" if models else None,
        "tags": ["massmerge", "model-merging", plan.method],
    }
    return {key: value for key, value in data.items() if value}


def _pipeline_tag(prepared: OpenedRecipe) -> str:
    if prepared.base.writes:
        return "text-generation"
    image, bundle = _input_of(prepared) == "image", prepared.plan.method == "mass"
    if image:
        return "image-classification" if bundle else "image-feature-extraction"
    return "text-classification" if bundle else "feature-extraction"


def _input_of(prepared: OpenedRecipe) -> str:
    """What one gives the model, in a word."""
    return "image" if prepared.base.skeleton.model.main_input_name == "pixel_values" else "text"


def _labels(task: TaskPlan) -> str:
    if task.labels is None:
        return "texts"
    shown = ", ".join(label.replace("|", "\\|").replace("\n", " ") for label in task.labels[:_SHOWN_LABELS])
    return shown + (f" and {len(task.labels) - _SHOWN_LABELS} more" if len(task.labels) > _SHOWN_LABELS else "")


def _named(task: TaskPlan) -> str:
    """An expert by its name on the hub; one of a folder has none that others know."""
    name = task.source.partition("@")[0]
    return f"[{name}](https://huggingface.co/{name})" if task.revision and is_repository(name) else "a local one"


def _licences(prepared: OpenedRecipe) -> str:
    """The licences of the parts, where they are known."""
    base, tasks = terms_of_all(prepared)
    known = {"base": base, **tasks}
    rows = [f"- {name}: {terms.license}" for name, terms in known.items() if terms.license]
    unknown = [name for name, terms in known.items() if not terms.license]
    if not rows:
        return ""
    rest = f"\nThe cards of {', '.join(unknown)} name no licence.\n" if unknown else ""
    return f"\nLicences by the cards of base and experts:\n\n{_lines(rows)}{rest}"


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)
