"""A suite of three tiny text tasks in two splits, which the tests of studies share."""

import torch

WORDS = "free win prize call meeting report goal team match vote law party cell gene star film song bad good sad"
LABELS = {"spam": ("ham", "spam"), "topic": ("politics", "sports", "science", "arts"), "mood": ("negative", "positive")}


def write_study_suite(folder, count=12):
    """So many rows of each task in each split; returns the suite's path."""
    generator = torch.Generator().manual_seed(5)
    lines = ["tasks:"]
    for task, labels in LABELS.items():
        lines.append(f"  {task}:\n    data: {task}-{{split}}.csv\n    input: text\n    reference: {{test: 0.5}}")
        for split in ("test", "validation"):
            rows = ["text,label"]
            for i in range(count):
                chosen = torch.randint(20, (3 + i % 4,), generator=generator).tolist()
                rows.append(f"{' '.join(WORDS.split()[c] for c in chosen)},{labels[i % len(labels)]}")
            (folder / f"{task}-{split}.csv").write_text("\n".join(rows) + "\n")
    (folder / "suite.yaml").write_text("\n".join(lines) + "\n")
    return folder / "suite.yaml"
