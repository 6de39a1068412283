"""What a vision task is made of: encoded images with a class name each, and how arrays and drawings become such images."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.suites.fetch import archive_source
from benchmarks.suites.splits import draw

SEED = 0
POOL = 8000  # images taken from a large set before anything is encoded: twice what the splits hold


@dataclass(frozen=True)
class Examples:
    """A task's images, encoded as PNG, JPEG or WEBP, with a class name each, and where they come from.

    `threads` names what an image was made from where several were made from one thing, such as a font: no thread lies on
    both sides of a split.
    """

    images: Sequence[bytes]
    labels: Sequence[str]
    source: dict[str, Any]
    licence: str
    threads: Sequence[str] | None = None


def encoded(pixels: NDArray[np.uint8], labels: Sequence[str], folder: Path, licence: str) -> Examples:
    """Arrays of one size as PNG files; of a large set only a share of each class."""
    rows = draw(labels, POOL, SEED)
    images = [png(Image.fromarray(pixels[i])) for i in rows]
    return Examples(images, [labels[i] for i in rows], archive_source(folder), licence)


def drawn(rows: Sequence[tuple[Image.Image, str, str]], folders: Sequence[Path], licence: str) -> Examples:
    """Images with a label and a thread each, as PNG files, out of one or several archives."""
    sources = [archive_source(folder) for folder in folders]
    images, labels, threads = zip(*rows, strict=True)
    source = sources[0] if len(sources) == 1 else {"packages": sources}
    return Examples([png(image) for image in images], labels, source, licence, threads)


def on_white(path: Path) -> NDArray[np.uint8]:
    """A picture with transparent parts, laid on white."""
    return np.asarray(over(Image.open(path), "white"))


def over(image: Image.Image, ground: str) -> Image.Image:
    """A picture with transparent parts, laid on a ground of one colour."""
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, ground), image).convert("RGB")


def png(image: Image.Image) -> bytes:
    """An image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def as_bytes(values: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Shades from 0 to 1 as bytes."""
    return np.rint(values.clip(0, 1) * 255).astype(np.uint8)
