"""Inputs that belong to no task of a suite, by kind, to see whether a bundle tells them from its own.

Source code is this project's own; other languages are quotations from Debian's `fortunes-*` packages; random words are drawn
from the texts of the suite itself, so that only their order is foreign; photographs are crops of those in scikit-image.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.suites.fetch import deb_archive, pip_archive

_SOURCES = Path(__file__).parents[1] / "src" / "massmerge"
_LANGUAGES = ("de", "es", "it", "pl", "ru")
_PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "motorcycle_left.png",
                "retina.jpg", "rocket.jpg", "camera.png", "brick.png", "grass.png", "gravel.png")  # fmt: skip
_SIDE = 224


def foreign_texts(known: Sequence[str], count: int, seed: int = 0) -> dict[str, list[str]]:
    """Texts of no task, so many of each kind.

    Args:
        known: texts of the suite, whose words the random ones are made of.
        count: how many of each kind.
        seed: of the draw.
    """
    draw = random.Random(seed)
    words = [word for text in known for word in text.split()]
    letters = [*map(chr, range(33, 127)), *" " * 15]
    return {
        "source code": _some(_code(), count, draw),
        "other languages": [
            text for language in _LANGUAGES for text in _some(_fortunes(language), -(-count // len(_LANGUAGES)), draw)
        ][:count],
        "random words": [" ".join(draw.choices(words, k=draw.randint(5, 40))) for _ in range(count)],
        "noise": ["".join(draw.choices(letters, k=draw.randint(20, 200))) for _ in range(count)],
    }


def foreign_images(count: int, seed: int = 0) -> dict[str, list[Image.Image]]:
    """Images of no task, so many of each kind."""
    draw = np.random.default_rng(seed)
    noise = [draw.integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8) for _ in range(count)]
    return {"noise": [Image.fromarray(pixels) for pixels in noise], "photographs": _crops(count, draw)}


def _some(texts: list[str], count: int, draw: random.Random) -> list[str]:
    return draw.sample(texts, min(count, len(texts)))


def _code() -> list[str]:
    """Pieces of twelve lines of Python."""
    found = []
    for path in sorted(_SOURCES.rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()[4:]
        found += ["\n".join(lines[at : at + 12]) for at in range(0, len(lines) - 12, 24)]
    return [text for text in found if len(text) > 100]


def _fortunes(language: str) -> list[str]:
    """Quotations of a hundred characters and more."""
    folder = deb_archive(f"fortunes-{language}") / "usr/share/games/fortunes"
    found = []
    for path in sorted(
        p for p in folder.rglob("*") if p.is_file() and not p.is_symlink() and p.suffix not in (".dat", ".u8")
    ):
        text = re.sub(r"\x1b\[[0-9;]*m", "", path.read_text(encoding="utf-8", errors="replace"))
        found += [" ".join(part.split()) for part in re.split(r"\n%\s*\n", text)]
    return sorted({text for text in found if 100 <= len(text) <= 600 and "\ufffd" not in text})


def _crops(count: int, draw: np.random.Generator) -> list[Image.Image]:
    folder = pip_archive("scikit-image", "0.26.0")
    paths = sorted(path for name in _PHOTOGRAPHS for path in folder.rglob(name))
    found = []
    for number in range(count):
        with Image.open(paths[number % len(paths)]) as file:
            image = file.convert("RGB")
        side = int(min(image.size) * draw.uniform(0.5, 1.0))
        left, top = (int(draw.integers(0, length - side + 1)) for length in image.size)
        found.append(image.crop((left, top, left + side, top + side)).resize((_SIDE, _SIDE)))
    return found
