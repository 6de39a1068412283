"""The demo on texts: carried LoRA adapters of one MiniLM, with rows to evaluate them on."""

from __future__ import annotations

import json
from pathlib import Path

from massmerge.cli.demo.base import find_minilm, write_base
from massmerge.cli.demo.folder import PAGE, Demo, Placed, open_folder, place
from massmerge.errors import MassError

DATA = Path(__file__).parent / "data"
# Written for the demo; they stand in no data set.
INPUTS = (
    "URGENT! You have won a free holiday for two. Call 0800 123 456 now to claim your prize",
    "a small burrowing animal with striped fur and a bushy tail",
    "Wireless noise-cancelling headphones, over-ear, black",
)


def make_text_demo(folder: Path) -> Demo:
    """Lay the demo out: base, experts, rows, recipe and suite.

    Raises:
        InputError: the base cannot be had, or the folder holds something else.
        MassError: the folder cannot be written.
    """
    found, where = find_minilm()
    open_folder(folder, "text")
    placed = Placed()
    about = json.loads((DATA / "about.json").read_text(encoding="utf-8"))
    try:
        (placed.written if write_base(found, folder / "base") else placed.reused).append("base/")
        for path in sorted(p for p in DATA.rglob("*") if p.is_file()):
            name = path.relative_to(DATA)
            top = name.parts[0] + "/" * (len(name.parts) > 1)
            place(folder / name, path.read_bytes(), placed, top)
    except OSError as error:
        raise MassError(f"{error.filename or folder}: cannot be written ({error.strerror}).") from None
    nbytes = sum(p.stat().st_size for p in (folder / "experts").rglob("*") if p.is_file())
    count = len(about["tasks"])
    return Demo(
        folder,
        f"all-MiniLM-L6-v2, from {where}",
        f"{count} LoRA adapters of rank {about['rank']}, cut by SVD from full fine-tunes, {nbytes / 1e6:.1f} MB in all",
        INPUTS,
        _next(list(about["tasks"])),
        placed,
    )


def _next(tasks: list[str]) -> tuple[tuple[str, str], ...]:
    inputs = "".join(f" \\\n  --inputs {task}=inputs/{task}.jsonl" for task in tasks)
    return (
        ('mass predict out "any text of yours"', "answers anything"),
        (f"mass predict out rows/{tasks[-1]}.jsonl --column text", "answers a whole file"),
        ("mass verify out --experts", "proves that every expert is in it"),
        (
            f"mass calibrate out --column text{inputs}",
            "fits a router on 16 unlabelled texts per task; then evaluate again",
        ),
        ("mass serve out --examples examples.txt", f"answers over HTTP, with a page to try it: {PAGE}"),
    )
