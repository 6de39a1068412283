"""Merges recipe.yaml and measures it against the unmerged experts: `python measure.py`, after `python fetch.py`.

Each published expert answers by itself as its package runs it: by PyTorch, by onnxruntime, by embeddings. Texts of the
three are in texts/, written for this: 16 of 45 calibrate, the others measure. Ours are measured on the demo's rows.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from fetch import embed
from transformers import AutoModel, AutoTokenizer

import massmerge as mm
from massmerge.model.calibrate import calibrate

HERE = Path(__file__).parent
OTHERS = ("filters", "injection", "sre")
GIVEN = 16  # texts of each task that calibrate
ROWS = 60  # rows of each of our tasks
PACKAGES = HERE / "packages"


def read_lines(path: Path) -> list[str]:
    """A file of one text per line, or of the `text` of one JSON object per line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines] if path.suffix == ".jsonl" else lines


def texts_of(task: str) -> tuple[list[str], list[str]]:
    """Texts to calibrate with, and texts to measure."""
    if task in OTHERS:
        lines = read_lines(HERE / "texts" / f"{task}.txt")
        # Both halves get of everything: files are sorted by kind.
        chosen = set(np.linspace(0, len(lines) - 1, GIVEN).round().astype(int).tolist())
        return [t for i, t in enumerate(lines) if i in chosen], [t for i, t in enumerate(lines) if i not in chosen]
    data = HERE / "ours"
    return read_lines(data / "inputs" / f"{task}.jsonl")[:GIVEN], read_lines(data / "rows" / f"{task}.jsonl")[:ROWS]


@torch.inference_mode()
def alone(task: str, texts: Sequence[str], labels: Sequence[str]) -> list[str]:
    """What a published expert answers by itself, without any code of ours."""
    if task == "sre":
        folder = PACKAGES / "sre-embedding-model" / "sre_embedding_model" / "model_weights"
        return [labels[i] for i in (embed(folder, list(texts)) @ embed(folder, list(labels)).T).argmax(1)]
    tokenizer = AutoTokenizer.from_pretrained(HERE / "ours" / "base")
    if task == "injection":
        session = onnxruntime.InferenceSession(PACKAGES / "cloneguard" / "cloneguard" / "model" / "mini_semantic.onnx")
        tokens = tokenizer(list(texts), padding="max_length", truncation=True, max_length=256, return_tensors="np")
        given = {name: tokens[name].astype(np.int64) for name in ("input_ids", "attention_mask")}
        return [labels[i] for i in session.run(["logits"], given)[0].argmax(1)]
    state = torch.load(PACKAGES / "text2filter" / "text2filter" / "model" / "twohead_model.pt", map_location="cpu",
                       weights_only=True)  # fmt: skip
    model = AutoModel.from_pretrained(HERE / "ours" / "base").eval()
    model.load_state_dict({n.removeprefix("transformer."): t for n, t in state.items() if n.startswith("transformer.")})
    tokens = tokenizer(list(texts), padding="max_length", truncation=True, max_length=32, return_tensors="pt")
    first = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state[:, 0]
    found = first @ state["filter_head.weight"].T + state["filter_head.bias"]
    return [labels[i] for i in found.argmax(1)]


def share(right: Sequence[bool]) -> float:
    """The share that is right, in per cent."""
    return round(100 * sum(right) / len(right), 1)


def figures(model: mm.Model) -> dict[str, dict[str, float | int]]:
    """Routing of each task; of the published ones also answers that are the unmerged expert's, task given and not."""
    found: dict[str, dict[str, float | int]] = {}
    for task in model.tasks:
        _, texts = texts_of(task)
        free = model.predict(texts)
        own: dict[str, float | int] = {"texts": len(texts), "routed": share([p.task == task for p in free])}
        own["to others"] = sum(p.task in OTHERS and p.task != task for p in free)
        if task in OTHERS:
            wanted = alone(task, texts, model.labels[task])
            known = model.predict(texts, task=task)
            own["same, task given"] = share([p.label == w for p, w in zip(known, wanted, strict=True)])
            own["same"] = share([(p.task, p.label) == (task, w) for p, w in zip(free, wanted, strict=True)])
        found[task] = own
    return found


def main() -> None:
    """Merge, measure, calibrate, measure."""
    bundle = HERE / "out"
    if not bundle.exists():
        mm.merge(HERE / "recipe.yaml", bundle)
    found = {"data-free": figures(mm.load(bundle))}
    fitted = HERE / "out-calibrated"
    shutil.rmtree(fitted, ignore_errors=True)
    shutil.copytree(bundle, fitted)
    calibrate(fitted, {task: texts_of(task)[0] for task in mm.load(bundle).tasks})
    found[f"{GIVEN} texts per task"] = figures(mm.load(fitted))
    (HERE / "result.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [
        f"{kind}: {task:12} " + "  ".join(f"{name} {value}" for name, value in own.items())
        for kind, tasks in found.items()
        for task, own in tasks.items()
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
