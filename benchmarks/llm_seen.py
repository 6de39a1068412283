"""What every site of SmolLM2 sees of the prompts of the suite: `python benchmarks/llm_seen.py [--split test] [--rows 20]`.

Adapters do not change what the first pass of the base sees, so rules of routing are compared on kept activations, by
`benchmarks/llm_routing.py`. Forms are those of the suite and `turns`: a prompt after a turn of another task.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.suites.llm.backbone import folder, make_base
from benchmarks.suites.llm.tasks import FORMS, TASKS, data_folder, make_data
from benchmarks.suites.splits import read_split
from massmerge.model.chat import empty_prompt
from massmerge.model.route.first_pass import FirstPass, Token, Voter
from massmerge.routing import find_sites

TOKENS: tuple[Token, ...] = ("mean", "last")
Seen = dict[str, Tensor]
"""By voter, activations (prompts, width)."""


def kept(split: str) -> Path:
    """Where the activations of a split are kept."""
    return folder() / f"seen-{split}.pt"


def prompts_of(split: str, rows: int, tokenizer: Any) -> Iterator[tuple[str, list[str]]]:
    """By form and task, the prompts; references beside them."""
    found: dict[str, dict[str, tuple[list[str], list[str]]]] = {}
    for form in FORMS:
        found[form] = {}
        for task in TASKS:
            make_data(task)
            prompts, answers = read_split(data_folder(form, task), split, "text")
            found[form][task] = prompts[:rows], answers[:rows]
            yield f"{form} {task}", prompts[:rows]
    names = list(TASKS)
    for place, task in enumerate(names):
        before, answers = found["chat"][names[place - 1]]
        own = found["chat"][task][0]
        # The later turn without the system prompt, which stands at the beginning once.
        yield (
            f"turns {task}",
            [
                f"{first}{answer}<|im_end|>\n{second[second.index('<|im_start|>user') :]}"
                for first, answer, second in zip(before, answers, own, strict=True)
            ],
        )
    yield "reference template", [empty_prompt(tokenizer) or ""]
    yield "reference newline", ["\n"]
    draw = torch.Generator().manual_seed(0)
    yield "reference words", [tokenizer.decode(torch.randint(49152, (16,), generator=draw)) for _ in range(32)]


def main() -> None:
    """Run the first pass on all prompts and keep what the sites see."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--rows", type=int, default=20)
    options = parser.parse_args()
    base = make_base()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base).model.eval()
    first = FirstPass(model, [Voter(site, token) for site in find_sites(model) for token in TOKENS])
    found: dict[str, Seen] = {}
    for name, prompts in tqdm(list(prompts_of(options.split, options.rows, tokenizer)), mininterval=20):
        parts = []
        for at in range(0, len(prompts), 5):
            batch = tokenizer(prompts[at : at + 5], padding=True, return_tensors="pt")
            parts.append([seen.rows.half() for seen in first(dict(batch))])
        found[name] = {voter.name: torch.cat(rows) for voter, *rows in zip(first.voters, *parts, strict=True)}
    torch.save(found, kept(options.split))


if __name__ == "__main__":
    main()
