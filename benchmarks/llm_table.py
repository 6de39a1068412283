"""The tables of docs/results/llm.md: `python benchmarks/llm_table.py --set chat [--form reworded] [--router prototype]`.

For each task: which share of the prompts finds it; whether the bundle's greedy answer, with the task given and routed, is
the same as the adapter's own by plain peft; and which answers are right. A text that has no right answer is compared by
its words (F1). What takes long is kept and read again: the adapters' answers, and the bundle's with the task given.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import massmerge as mm
from benchmarks.suites.llm.backbone import folder, make_base
from benchmarks.suites.llm.experts import KINDS, expert_folder, form_of
from benchmarks.suites.llm.recipe import NEW_TOKENS
from benchmarks.suites.llm.tasks import FORMS, TASKS, data_folder
from benchmarks.suites.splits import read_split

BATCH = 10


@dataclass(frozen=True)
class Rows:
    """Test prompts of a task, with the answers that they should have."""

    prompts: list[str]
    wanted: list[str]


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What is in a JSON file; made and written if there is none."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(make(), ensure_ascii=False), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))


def adapters_own(kind: Any, task: str, prompts: Sequence[str]) -> list[str]:
    """What plain peft answers with the task's adapter, greedily."""
    base = make_base()
    tokenizer: Any = AutoTokenizer.from_pretrained(base, padding_side="left")
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), expert_folder(task, kind)).eval()
    texts: list[str] = []
    for at in range(0, len(prompts), BATCH):
        batch = tokenizer(list(prompts[at : at + BATCH]), padding=True, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            written = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
        texts += tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def overlap(first: str, second: str) -> float:
    """F1 of the words of two texts.

    >>> overlap("a b c", "b c d e")
    0.5714285714285714
    """
    one, two = Counter(first.lower().split()), Counter(second.lower().split())
    shared = sum((one & two).values())
    return 2 * shared / max(1, sum(one.values()) + sum(two.values()))


def is_right(task: str, text: str, wanted: str) -> float:
    """Whether an answer is the one that is wanted; of free text, the overlap with it."""
    return overlap(text, wanted) if TASKS[task].free else float(text.strip().lower() == wanted.strip().lower())


def measure(
    model: mm.Model, where: Path, kind: Any, rows: dict[str, Rows], *, answers: bool
) -> dict[str, dict[str, float]]:
    """The figures of each task."""
    found = {}
    for task, own in rows.items():
        routings = model.route(own.prompts, batch_size=BATCH)
        chosen = [routing.selected[0] for routing in routings]
        found[task] = {"routing": share(name == task for name in chosen)}
        print(task, Counter(chosen), flush=True)
        if not answers:
            continue
        theirs = kept(where / f"adapter-{task}.json", lambda: adapters_own(kind, task, own.prompts))  # noqa: B023
        given = kept(where / f"given-{task}.json", lambda: _given(model, task, own.prompts))  # noqa: B023
        wrong = [i for i, name in enumerate(chosen) if name != task]
        others = model.write([own.prompts[i] for i in wrong], [routings[i] for i in wrong], batch_size=BATCH,
                             max_new_tokens=NEW_TOKENS) if wrong else []  # fmt: skip
        routed = list(given)
        for i, other in zip(wrong, others, strict=True):
            routed[i] = other.text or ""
        found[task] |= {
            "right, adapter": share(is_right(task, *pair) for pair in zip(theirs, own.wanted, strict=True)),
            "right, given": share(is_right(task, *pair) for pair in zip(given, own.wanted, strict=True)),
            "right, routed": share(is_right(task, *pair) for pair in zip(routed, own.wanted, strict=True)),
            "same, given": share(a == b for a, b in zip(theirs, given, strict=True)),
            "same, routed": share(a == b for a, b in zip(theirs, routed, strict=True)),
            "words, given": share(overlap(a, b) for a, b in zip(theirs, given, strict=True)),
        }
        print(task, {name: round(value, 3) for name, value in found[task].items()}, flush=True)
    return found


def _given(model: mm.Model, task: str, prompts: list[str]) -> list[str]:
    written = model.generate(prompts, task=task, batch_size=BATCH, max_new_tokens=NEW_TOKENS)
    return [one.text or "" for one in written]


def share(values: Any) -> float:
    """The mean of some values."""
    numbers = [float(value) for value in values]
    return sum(numbers) / max(1, len(numbers))


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown, with a mean of all tasks; normalised is what is right, routed, over what is right by the adapter itself."""
    names = list(next(iter(found.values())))
    mean = {name: share(one[name] for one in found.values()) for name in names}
    lines = ["| task | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for task, one in [*found.items(), ("mean", mean)]:
        lines.append(f"| {task} | " + " | ".join(f"{100 * one[name]:.1f} %" for name in names) + " |")
    if "right, routed" in mean:
        labelled = [one["right, routed"] / one["right, adapter"] for task, one in found.items() if not TASKS[task].free]
        lines.append(f"\nnormalised, routed, tasks with labels: {100 * share(labelled):.1f} %")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", dest="kind", choices=KINDS, default="chat")
    parser.add_argument("--form", choices=FORMS, help="of the prompts, if not that of the set")
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--split", default="test")
    parser.add_argument("--bundle", type=Path, help="another bundle than that of the set")
    parser.add_argument("--router", help="a router that was calibrated, instead of the bundle's own")
    parser.add_argument("--routing-only", action="store_true")
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    form = options.form or form_of(options.kind)
    rows = {}
    for task in TASKS:
        prompts, wanted = read_split(data_folder(form, task), options.split, "text")
        rows[task] = Rows(prompts[: options.rows], wanted[: options.rows])
    bundle = options.bundle or folder() / "bundles" / options.kind
    model = mm.load(bundle, router=options.router, check=False)
    where = folder() / "answers" / f"{options.kind}-{form}-{options.split}-{options.rows}"
    found = measure(model, where, options.kind, rows, answers=not options.routing_only)
    print(f"\n{options.kind} adapters, {form} prompts, {options.rows} {options.split} rows per task\n\n{table(found)}")


if __name__ == "__main__":
    main()
