"""Suites to evaluate: of a model whose answers are known, and of the bundle of text tasks."""

import json
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np

import massmerge
from massmerge import Prediction, Routing
from models import text_bundle
from study_suite import WORDS

LABELS = {"a": ("x", "y"), "b": ("x", "y", "z"), "c": ("x",)}


class Spied:
    """A model whose answers are known; it notes how it was asked."""

    takes_images = False
    voters = ("M0.mean",)

    def __init__(self, answer=None, labels=LABELS):
        self.answer, self.calls = answer, []
        self.tasks, self.labels, self.shared_labels = list(labels), labels, []
        self.problems = dict.fromkeys(labels, "single_label_classification")

    def stream(self, inputs, *, task=None, **options):
        assert isinstance(inputs, Iterator)  # never all of them at once
        items: list = []
        self.calls.append(SimpleNamespace(task=task, items=items, options=options))
        for item in inputs:
            items.append(item)
            if isinstance(item, Exception):
                yield Prediction(None, error=str(item))
                continue
            found, label, selected = self.answer(item, task)
            residuals = {t: -2.0 if t in selected[:1] else 1.0 for t in self.tasks}
            routing = Routing(residuals if task is None else {}, {}, list(selected), "M0.mean")
            timings = {"first pass": 4.0, "routing": 1.0, "second pass": 8.0, "heads": 2.0, "inputs": 4}
            yield Prediction(found, label, 0.9, 1.0, routing=routing, timings=timings)


def write_suite(folder, rows, **more):
    """A suite of .csv files; rows are pairs of text and label by task."""
    lines = ["tasks:"]
    for task, pairs in rows.items():
        (folder / f"{task}.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in pairs))
        lines.append(f"  {task}:\n    data: {task}.csv\n    input: text")
        lines += [f"    {key}: {value}" for key, value in more.get(task, {}).items()]
    if "shared_labels" in more:
        lines.append(f"shared_labels: {json.dumps(more['shared_labels'])}")
    (folder / "suite.yaml").write_text("\n".join(lines) + "\n")
    return folder / "suite.yaml"


def random_world(tmp_path, seed, **more):
    """Rows of two tasks, and a model that answers them at random but always the same."""
    random = np.random.default_rng(seed)
    rows = {t: [(f"{t}{i}", str(random.choice(LABELS[t]))) for i in range(n)] for t, n in (("a", 37), ("b", 61))}
    answers = {}
    for task, pairs in rows.items():
        for text, label in pairs:
            kind = random.random()
            other = str(random.choice(["a", "b", "c"]))
            if kind < 0.5:
                answers[text] = (task, label, (task,))
            elif kind < 0.9:
                answers[text] = (other, str(random.choice(LABELS[other])), (other, "c") if other != "c" else ("c",))
            else:
                answers[text] = (None, None, ())
    known = {text: str(random.choice(LABELS[text[0]])) for text in answers}

    def answer(text, task):
        return answers[text] if task is None else (task, known[text], (task,))

    return write_suite(tmp_path, rows, **more), Spied(answer), rows, answers, known


def texts(count, seed):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS.split(), random.integers(2, 9))) for _ in range(count)]


def text_suite(tmp_path, root, count=12, **more):
    """The text bundle's tasks with random texts and labels: the suite, and pairs of text and label by task."""
    labels = {task.name: task.labels for task in massmerge.Bundle(text_bundle(root)).tasks}
    random = np.random.default_rng(0)
    rows = {
        task: [(text, str(random.choice(names))) for text in texts(count, seed)]
        for seed, (task, names) in enumerate(labels.items())
    }
    return write_suite(tmp_path, rows, **more), rows
