"""Static merges and routed peers beside the bundle: `python benchmarks/llm_static.py --set chat [--rows 15]`.

One merged checkpoint answers all prompts, or a peer that mixes the adapters for each token; right answers as in
`benchmarks/llm_table.py`, whose kept answers of the adapters they are compared with.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import massmerge as mm
from benchmarks.llm_table import BATCH, adapters_own, is_right, kept, share
from benchmarks.suites.llm.backbone import folder, make_base
from benchmarks.suites.llm.experts import KINDS, form_of
from benchmarks.suites.llm.recipe import NEW_TOKENS, recipe, write_files
from benchmarks.suites.llm.tasks import TASKS, data_folder
from benchmarks.suites.splits import read_split
from massmerge.evaluation.from_recipe import open_sources
from massmerge.recipe import Recipe
from massmerge.research.peers import PEERS

METHODS = ("none", "average", "task_arithmetic", "ties", "tsv_m", "smile_1", "arrow", "mass")
"""`none` is the base itself, `smile_1` and `arrow` are routed peers, `mass` is the bundle."""
OPTIONS: dict[str, dict[str, Any]] = {"smile_1": {"gate": 4, "rank": 16}}  # the paper's for language models


def make_merged(kind: Any, method: str) -> Path:
    """The folder of the merged checkpoint; made when first asked for."""
    if method == "none":
        return make_base()
    target = folder() / "static" / f"{kind}-{method}"
    if not (target / "config.json").is_file():
        target.parent.mkdir(exist_ok=True)
        path = folder() / f"recipe-{kind}-{method}.yaml"
        content = {**recipe(kind, list(TASKS)), "merge": {"method": method}}
        content.pop("router", None)
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        mm.merge(path, target)
    return target


def answers(model: Path, prompts: list[str]) -> list[str]:
    """What a checkpoint answers, greedily."""
    tokenizer: Any = AutoTokenizer.from_pretrained(make_base(), padding_side="left")
    language: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    texts: list[str] = []
    for at in range(0, len(prompts), BATCH):
        batch = tokenizer(prompts[at : at + BATCH], padding=True, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            written = language.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
        texts += tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def peers_answers(recipe_file: Path, name: str, prompts: list[str], tasks: list[str]) -> list[str]:
    """What a routed peer answers, greedily."""
    sources = open_sources(Recipe.load(recipe_file), recipe_file.parent)
    peer = PEERS[name](sources, **OPTIONS.get(name, {}))
    found = peer.outcomes(prompts, tasks, batch_size=BATCH, max_new_tokens=NEW_TOKENS, do_sample=False)
    return [str(free.label or "") for free, _ in found]


def answers_by(kind: Any, method: str, prompts: list[str], rows: int) -> list[str]:
    """What a method answers; so many prompts are of each task, one after the other."""
    if method in PEERS:
        tasks = [task for task in TASKS for _ in range(rows)]
        return peers_answers(write_files(kind, list(TASKS))[0], method, prompts, tasks)
    if method == "mass":
        bundle = mm.load(folder() / "bundles" / kind, check=False)
        found = bundle.generate(prompts, batch_size=BATCH, max_new_tokens=NEW_TOKENS)
        return [one.text or "" for one in found]
    return answers(make_merged(kind, method), prompts)


def theirs_of(own: Path, kind: Any, task: str, prompts: list[str], rows: int) -> list[str]:
    """What the task's adapter itself answers to the first rows: from `benchmarks/llm_table.py`, where that was run."""
    name = f"adapter-{task}.json"
    if not (own / name).is_file():
        own = own.with_name(f"{own.name.removesuffix('-30')}-{rows}")
    found: list[str] = kept(own / name, lambda: adapters_own(kind, task, prompts[:rows]))
    return found[:rows]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", dest="kind", choices=KINDS, default="chat")
    parser.add_argument("--rows", type=int, default=15)
    parser.add_argument("--methods", default=",".join(METHODS))
    options = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    form = form_of(options.kind)
    rows = {task: read_split(data_folder(form, task), "test", "text") for task in TASKS}
    own = folder() / "answers" / f"{options.kind}-{form}-test-30"
    theirs = {task: theirs_of(own, options.kind, task, rows[task][0], options.rows) for task in TASKS}
    print("| method | right | normalised, tasks with labels | same as the adapter |\n|---|---|---|---|", flush=True)
    for method in options.methods.split(","):
        where = folder() / "answers" / f"{options.kind}-{method}-{options.rows}.json"
        prompts = [prompt for task in TASKS for prompt in rows[task][0][: options.rows]]
        found = kept(where, partial(answers_by, options.kind, method, prompts, options.rows))
        right, normalised, same = [], [], []
        for place, task in enumerate(TASKS):
            given = found[place * options.rows : (place + 1) * options.rows]
            wanted = rows[task][1][: options.rows]
            score = share(is_right(task, *pair) for pair in zip(given, wanted, strict=True))
            theirs_score = share(
                is_right(task, *pair) for pair in zip(theirs[task][: options.rows], wanted, strict=True)
            )
            right.append(score)
            normalised += [] if TASKS[task].free or not theirs_score else [score / theirs_score]
            same.append(share(a == b for a, b in zip(given, theirs[task], strict=False)))
        figures = " | ".join(f"{100 * share(values):.1f} %" for values in (right, normalised, same))
        print(f"| {method} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
