"""A text head of class names, written to a file that a recipe can name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from massmerge.checkpoints import find_source, open_base
from massmerge.errors import InputError
from massmerge.io.durable import drafted
from massmerge.io.tensor_file import write_tensors
from massmerge.merging.heads.labels import repeated
from massmerge.merging.heads.text import TextTower, read_texts, text_head
from massmerge.recipe import TextHead


@dataclass(frozen=True)
class WrittenHead:
    """A head that `head` wrote."""

    path: str
    classes: int
    templates: int
    shape: tuple[int, ...]
    """Of its weight: classes and width."""
    scale: float
    """What cosines of images and texts are multiplied by."""

    def to_dict(self) -> dict[str, Any]:
        """The head as plain data."""
        return asdict(self)


def make_head(
    base: str,
    classes: str | Path | Sequence[str],
    out: str | Path,
    *,
    templates: str | Sequence[str] = "photo",
    tokenizer: str | None = None,
) -> WrittenHead:
    """Write a head for class names, made by the text tower of a base.

    A recipe uses it as `head: {weights: OUT, labels: CLASSES, normalize: true}`.

    Args:
        base: a whole CLIP or SigLIP model: folder, hub id, or a state dict of open_clip.
        classes: the class names, or the path of a file with one per line.
        out: the .safetensors file to write.
        templates: sentences with `{}` for the class, the name of a set of them, or the path of a file.
        tokenizer: folder or hub id of the tokenizer, if it is not with the base.

    Raises:
        InputError: the base has no text tower, or classes, templates or `out` are wrong; nothing was written.
    """
    target, here = Path(out), Path()
    if target.suffix != ".safetensors":
        raise InputError(f"{out}: a head is a .safetensors file; give it that ending.")
    given = str(classes) if isinstance(classes, str | Path) else list(classes)
    wanted = templates if isinstance(templates, str) else list(templates)
    names, used = read_texts(TextHead(classes=given, templates=wanted), here)
    if twice := repeated(names):
        where = given if isinstance(given, str) else "classes"
        raise InputError(f"{where}: has {twice} more than once. Give each class its own name.")
    opened = open_base(find_source(base, here, download=True))
    source = opened.source if tokenizer is None else find_source(tokenizer, here, download=True)
    tower = TextTower(opened, source)
    tensors = text_head(tower, names, used)
    target.parent.mkdir(parents=True, exist_ok=True)
    with drafted(target) as draft:
        write_tensors(draft, tensors)
    return WrittenHead(str(out), len(names), len(used), tuple(tensors["weight"].shape), tower.scale)
