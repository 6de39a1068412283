"""The tasks of the suite of a language model: inputs and answers, and the prompts that ask for them.

Each task has an instruction that its adapter is trained with, and two others that ask for the same in other words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from benchmarks.suites.llm.backbone import folder, make_base
from benchmarks.suites.splits import SPLITS, Caps, read_split, write_task
from benchmarks.suites.text import tasks as text
from massmerge.errors import InputError

Form = Literal["chat", "reworded", "plain", "bare"]
"""Prompts in the chat format with the instruction, with another one, without any; and the bare input."""
FORMS: tuple[Form, ...] = get_args(Form)
ROWS = {"train": 640, "validation": 60, "test": 30}
WORDS, CHARACTERS = 24, 140  # of an input; a training step takes as long as its longest prompt


@dataclass(frozen=True)
class Task:
    """A task as instructions.

    Attributes:
        source: the task of the text suite that has the rows; none for a task with rows of its own.
        instruction: what its adapter is trained with; `{text}` is the input.
        reworded: other words for the same, never seen in training.
        steps: of training, four prompts each.
        end: an input that is too long keeps its end instead of its beginning.
        free: the answer is text of the adapter's own, so it is compared by its words.
    """

    source: str | None
    instruction: str
    reworded: tuple[str, ...]
    steps: int = 44
    end: bool = False
    free: bool = False


TASKS: dict[str, Task] = {
    "spam": Task(
        "sms_spam",
        "Is this text message spam or ham? Answer with one word.\n\n{text}",
        ("Here is an SMS I got: {text}\nDoes it look like junk mail to you, or is it ham?",
         "Filter my phone's inbox: say spam for advertising and fraud, ham for anything else.\nMessage: {text}"),
        steps=36,
    ),
    "sentiment": Task(
        "imdb",
        "Decide whether this film review is positive or negative.\n\n{text}",
        ("Did the person who wrote the following enjoy the movie?\n{text}",
         "{text}\n\nWhat is the reviewer's opinion, positive or negative?"),
        end=True,
    ),
    "kind": Task(
        "glosses",
        "What kind of thing does this definition describe?\n\n{text}",
        ("A dictionary says: {text}\nName the category of the thing that is meant.",
         "Sort this noun's meaning into a class such as animal, food, act or time: {text}"),
        steps=60,
    ),
    "department": Task(
        "products",
        "Which department of the shop sells this product?\n\n{text}",
        ("A customer asks for \"{text}\". Where in the store should we send them?",
         "Assign a category of our online shop to the following item.\nItem: {text}"),
        steps=52,
    ),
    "offensive": Task(
        "offensive",
        "Is this comment offensive or clean? Answer with one word.\n\n{text}",
        ("You moderate a forum. Should the next post be removed as offensive, or is it clean?\nPost: {text}",
         "{text}\n\nWould people feel insulted by this remark?"),
        end=True,
    ),
    "question": Task(
        "questions",
        "What type of answer does this question ask for?\n\n{text}",
        ("Someone wants to know: {text}\nAre they looking for a person, a place, a number or something else?",
         "Do not answer the following, only tell which sort of answer would fit.\n{text}"),
        steps=48,
    ),
    "title": Task(
        None,
        "Write a subject line for this message.\n\n{text}",
        ("How would you title the e-mail below?\n\n{text}",
         "Summarise what follows in a few words, fit for the subject of a post.\n\n{text}"),
        steps=48,
        free=True,
    ),
}  # fmt: skip


def data_folder(form: str, task: str) -> Path:
    """Where the rows of a task in one form lie."""
    return folder() / "data" / form / task


def make_data(name: str) -> None:
    """The task's rows in every form: columns `text`, the prompt, and `label`, the answer. Made when first asked for."""
    if (data_folder(FORMS[-1], name) / "data.json").is_file():
        return
    tokenizer = AutoTokenizer.from_pretrained(make_base())
    rows = {split: _pairs(name, split)[: ROWS[split]] for split in SPLITS}
    for form in FORMS:
        target = data_folder(form, name)
        target.mkdir(parents=True, exist_ok=True)
        for split, pairs in rows.items():
            inputs = [shortened(one, TASKS[name].end) for one, _ in pairs]
            prompts = [prompt(name, form, one, i, tokenizer) for i, one in enumerate(inputs)]
            table = {
                "text": prompts,
                "label": [label.lower() for _, label in pairs],
            }  # most labels are in small letters
            pq.write_table(pa.table(table), target / f"{split}.parquet")
        about = {"form": form, "from": TASKS[name].source, "rows": {split: len(pairs) for split, pairs in rows.items()}}
        (target / "data.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def prompt(name: str, form: Form, one: str, row: int, tokenizer: Any) -> str:
    """The prompt of one input. Rows take turns with the other instructions."""
    if form == "bare":
        return one + "\n"
    task = TASKS[name]
    template = {"chat": task.instruction, "reworded": task.reworded[row % len(task.reworded)], "plain": "{text}"}[form]
    messages = [{"role": "user", "content": template.replace("{text}", one)}]
    rendered: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return rendered


def shortened(one: str, end: bool = False) -> str:
    """An input in one line, cut to its first words, or to its last.

    >>> shortened("a  b")
    'a b'
    """
    words = one.split()
    line = " ".join(words[-WORDS:] if end else words[:WORDS])
    return line[-CHARACTERS:].lstrip() if end else line[:CHARACTERS].rstrip()


def choose(names: str | None) -> Sequence[str]:
    """Task names from a comma-separated list; all of them without one."""
    chosen = [name.strip() for name in names.split(",")] if names else list(TASKS)
    if unknown := [name for name in chosen if name not in TASKS]:
        raise InputError(f"no such task: {', '.join(unknown)}. The tasks are {', '.join(TASKS)}.")
    return chosen


def _pairs(name: str, split: str) -> list[tuple[str, str]]:
    """Inputs and answers of a split."""
    wanted = TASKS[name].source
    if wanted is None:
        rows, _ = read_split(_messages(), split, "text")
        return [(body, subject) for subject, _, body in (row.partition("\n") for row in rows)]
    inputs, labels = read_split(text.make_data(wanted), split, "text")
    return list(zip(inputs, labels, strict=True))


def _messages() -> Path:
    """Messages of news groups, subject and body, in a folder like those of the text suite."""
    target = folder() / "data" / "messages"
    if not (target / "data.json").is_file():
        rows = [row for row in text.newsgroups() if _tells(*row.text.split("\n", 1))]
        write_task(
            target, "text", [row.text for row in rows], ["message"] * len(rows), threads=[row.thread for row in rows],
            source={"from": "newsgroups of the text suite"}, licence="BSD", caps=Caps(1000, 100, 300),
        )  # fmt: skip
    return target


def _tells(subject: str, body: str) -> bool:
    """Whether a message has a short subject and begins with text of its own."""
    return 2 <= len(subject.split()) <= 7 and len(body.split()) >= 20 and "@" not in body[:200]
