"""Three tiny text tasks whose inputs are routed here and there, and a suite of them in two splits."""

from dataclasses import replace

import torch
from transformers import BertTokenizerFast

import massmerge
from models import FAMILIES, write_recipe

WORDS = "free win prize call meeting report goal team match vote law party cell gene star film song bad good sad"
TASKS = {"a": 2, "b": 3, "c": 4}


def study_bundle(root, name="study", **changes):
    """A bundle of three full experts with random updates, made once a run; its recipe lies beside it.

    A model of another shape has another name.
    """
    folder = root / name
    family = replace(FAMILIES["bert"], options={**FAMILIES["bert"].options, **changes})
    if not folder.exists():
        base = family.make_base()
        with torch.no_grad():
            base.embeddings.word_embeddings.weight[5:] *= 10  # words count, so that texts go to different tasks
        base.save_pretrained(folder / "base")
        for seed, (task, labels) in enumerate(TASKS.items()):
            family.make_expert(base, seed, labels).save_pretrained(folder / task)
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
        (folder / "base" / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
        BertTokenizerFast(vocab=str(folder / "base" / "vocab.txt"), model_max_length=32).save_pretrained(
            folder / "base"
        )
        massmerge.merge(write_recipe(folder, list(TASKS), rank=12), folder / "bundle")
    return folder / "bundle"


def write_study_suite(folder, count=16):
    """So many rows of each task in each split, with the reference 0.5; returns the suite's path."""
    generator = torch.Generator().manual_seed(5)
    lines = ["tasks:"]
    for task, labels in TASKS.items():
        lines.append(f"  {task}:\n    data: {task}-{{split}}.csv\n    input: text\n    reference: {{test: 0.5}}")
        for split in ("test", "validation"):
            rows = ["text,label"]
            for i in range(count):
                chosen = torch.randint(20, (2 + i % 4,), generator=generator).tolist()
                rows.append(f"{' '.join(WORDS.split()[c] for c in chosen)},LABEL_{i % labels}")
            (folder / f"{task}-{split}.csv").write_text("\n".join(rows) + "\n")
    (folder / "suite.yaml").write_text("\n".join(lines) + "\n")
    return folder / "suite.yaml"
