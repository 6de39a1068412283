"""What of a conversation is to be routed: `python benchmarks/llm_conversations.py [--set chat] [--count 12]`.

Conversations of two turns, made of validation rows of the suite. In half of them the second turn asks for another task than
the first, which was answered; in the other half it brings another input of the same task, without its instruction. Four
rules are compared on the votes of the same first passes: which share of the conversations finds the task of its last turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import massmerge as mm
from benchmarks.suites.llm.backbone import folder
from benchmarks.suites.llm.experts import KINDS
from benchmarks.suites.llm.tasks import TASKS, data_folder, make_data
from benchmarks.suites.splits import read_split
from massmerge.model.chat import last_turn
from massmerge.model.route.decide import Votes, cast_votes, count_votes, with_last_turns

Messages = list[dict[str, str]]
Rows = Sequence[tuple[str, str]]
"""Inputs with their answers."""
AGAIN = "And this one?\n\n{text}"
BATCH = 6


def conversations(rows: Mapping[str, Rows], count: int) -> dict[str, list[tuple[str, Messages]]]:
    """By kind, conversations with the task of their last turn."""
    names = list(rows)
    found: dict[str, list[tuple[str, Messages]]] = {"another task": [], "the same, without its instruction": []}
    another, same = found.values()
    for place, task in enumerate(names):
        before = names[place - 1]
        for i in range(count):
            second = rows[task][count + i][0]
            another.append((task, [*_answered(before, *rows[before][i]), _user(_asked(task, second))]))
            same.append((task, [*_answered(task, *rows[task][i]), _user(AGAIN.replace("{text}", second))]))
    return found


def _asked(task: str, text: str) -> str:
    return TASKS[task].instruction.replace("{text}", text)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answered(task: str, text: str, answer: str) -> Messages:
    return [_user(_asked(task, text)), {"role": "assistant", "content": answer}]


def votes_on(model: mm.Model, prompts: Sequence[Messages]) -> Votes:
    """What the voters say of conversations, each as one prompt."""
    look, parts = model.stages.first, []
    for at in range(0, len(prompts), BATCH):
        rows: list[Any] = [dict(model.read(one)) for one in prompts[at : at + BATCH]]  # plain: no turn of its own
        parts.append(cast_votes(look.voters, look.first_pass(model.core.batch(rows)), look.router))
    joined = [torch.cat(scores) for scores in zip(*(part.scores for part in parts), strict=True)]
    return replace(parts[0], scores=joined, lifts=None)  # lifts tell whether to abstain, which no rule does


def shares(model: mm.Model, asked: Sequence[tuple[str, Messages]]) -> dict[str, float]:
    """By rule, which share of conversations finds its task."""
    wholes = [messages for _, messages in asked]
    whole, last = votes_on(model, wholes), votes_on(model, [last_turn(one) or one for one in wholes])
    users = votes_on(model, [[one for one in messages if one["role"] != "assistant"] for messages in wholes])
    rules = {
        "the last turn": last,
        "all turns": whole,
        "the user's turns": users,
        "all turns, and half as much the last": with_last_turns(whole, list(range(len(asked))), last),
    }
    choice = model.stages.choice()
    return {
        name: sum(r.selected == [task] for r, (task, _) in zip(count_votes(votes, choice), asked, strict=True))
        / len(asked)
        for name, votes in rules.items()
    }


def suite_rows(split: str) -> dict[str, Rows]:
    """Inputs and answers of all tasks of the suite."""
    for task in TASKS:
        make_data(task)
    read = {task: read_split(data_folder("bare", task), split, "text") for task in TASKS}
    return {task: [(text.strip(), answer) for text, answer in zip(*own, strict=True)] for task, own in read.items()}


def table(found: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown: a row for each rule, a column for each kind of conversation."""
    lines = ["| what is routed | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for rule in next(iter(found.values())):
        lines.append(f"| {rule} | " + " | ".join(f"{100 * own[rule]:.1f} %" for own in found.values()) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", dest="kind", choices=KINDS, default="chat")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--count", type=int, default=12, help="conversations of each kind per task")
    parser.add_argument("--bundle", type=Path, help="another bundle than that of the set")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = mm.load(options.bundle or folder() / "bundles" / options.kind, check=False)
    asked = conversations(suite_rows(options.split), options.count)
    print(table({kind: shares(model, own) for kind, own in asked.items()}))


if __name__ == "__main__":
    main()
