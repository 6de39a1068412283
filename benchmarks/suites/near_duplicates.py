"""Groups of rows that are the same, or nearly: texts by their shingles, images by their thumbnails."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from tqdm import tqdm

Rows = NDArray[np.int64]

_SHINGLE = 5  # characters: short enough for product names, long enough that two film reviews share few
_PERMUTATIONS, _BAND = 128, 4
_WINDOW = 8  # candidates looked at on each side within a bucket: the work stays linear even if a bucket is huge
_LONGEST = 4000  # characters that are compared; more are never read by a model that takes 128 tokens
_THUMBNAIL = 16


def text_groups(texts: Sequence[str], threads: Sequence[str] | None = None, threshold: float = 0.7) -> Rows:
    """A group number for each text: those whose character shingles overlap by the threshold (Jaccard) share one.

    Args:
        texts: the texts. Case, punctuation and the values of digits are not compared.
        threads: texts with the same non-empty name here belong together whatever they say, such as answers in one thread.
        threshold: overlap from which two texts are near-duplicates.
    """
    signatures = _signatures([normalise(text) for text in texts])
    pairs = [_agreeing(signatures, pairs, threshold) for pairs in _candidates(signatures)]
    if threads is not None:
        pairs.append(_same(threads))
    return _components(pairs, len(texts))


def image_groups(images: Sequence[bytes], threads: Sequence[str] | None = None, threshold: float = 0.99) -> Rows:
    """A group number for each encoded image: those whose grey thumbnails correlate by the threshold share one.

    Args:
        images: the encoded images.
        threads: images with the same non-empty name here belong together whatever they show, such as letters of one font.
        threshold: correlation from which two images are near-duplicates.
    """
    thumbnails = np.stack([_thumbnail(image) for image in images])
    pairs = []
    for start in range(0, len(thumbnails), 1024):
        block = thumbnails[start : start + 1024] @ thumbnails[start:].T
        first, second = np.nonzero(np.triu(block, 1) >= threshold)
        pairs.append(np.stack([first, second], 1) + start)
    pairs.append(_same([hashlib.sha256(image).hexdigest() for image in images]))
    if threads is not None:
        pairs.append(_same(threads))
    return _components(pairs, len(images))


def normalise(text: str) -> str:
    """A text as it is compared: lower case, every number a 0, runs of anything but letters and digits one space."""
    return re.sub(r"[\W_]+", " ", re.sub(r"\d+", "0", text[:_LONGEST].lower())).strip()


def _signatures(texts: Sequence[str]) -> NDArray[np.uint32]:
    """MinHash signatures (texts, permutations): the share of equal entries estimates the overlap of the shingles."""
    random = np.random.default_rng(0)
    factors = random.integers(1, 2**63, (_PERMUTATIONS, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    offsets = random.integers(0, 2**63, (_PERMUTATIONS, 1), dtype=np.uint64)
    powers = np.uint64(1_000_003) ** np.arange(_SHINGLE, dtype=np.uint64)
    result = np.empty((len(texts), _PERMUTATIONS), dtype=np.uint32)
    for row, text in enumerate(
        tqdm(texts, desc="near-duplicates", unit="text", leave=False, disable=None if len(texts) >= 2000 else True)
    ):
        codes = np.frombuffer(f" {text} ".ljust(_SHINGLE).encode("utf-32-le"), dtype=np.uint32).astype(np.uint64)
        shingles = np.unique(np.lib.stride_tricks.sliding_window_view(codes, _SHINGLE) @ powers)
        result[row] = ((shingles * factors + offsets) >> np.uint64(32)).min(axis=1)
    return result


def _candidates(signatures: NDArray[np.uint32]) -> Iterator[Rows]:
    """Pairs of rows whose signatures agree in a whole band, band by band."""
    for start in range(0, _PERMUTATIONS, _BAND):
        band = np.ascontiguousarray(signatures[:, start : start + _BAND])
        order = np.lexsort(band.T)
        for step in range(1, min(_WINDOW, len(order) - 1) + 1):
            first, second = order[:-step], order[step:]
            equal = (band[first] == band[second]).all(axis=1)
            yield np.stack([first[equal], second[equal]], 1)


def _agreeing(signatures: NDArray[np.uint32], pairs: Rows, threshold: float) -> Rows:
    overlap = (signatures[pairs[:, 0]] == signatures[pairs[:, 1]]).mean(axis=1)
    return pairs[overlap >= threshold]


def _same(names: Sequence[str]) -> Rows:
    """Pairs of rows that have the same non-empty name: each row with the first of its name."""
    first: dict[str, int] = {}
    pairs = [(first.setdefault(name, row), row) for row, name in enumerate(names) if name]
    return np.asarray(pairs, dtype=np.int64).reshape(-1, 2)


def _components(pairs: Sequence[Rows], rows: int) -> Rows:
    """Rows that are linked by pairs, directly or through others, get one number."""
    links = np.concatenate([np.empty((0, 2), dtype=np.int64), *pairs])
    graph = coo_array((np.ones(len(links), dtype=np.int8), (links[:, 0], links[:, 1])), shape=(rows, rows))
    return connected_components(graph, directed=False)[1].astype(np.int64)


def _thumbnail(image: bytes) -> NDArray[np.float32]:
    """A small grey version, centred and scaled to length 1; zeros for an image of one shade."""
    with Image.open(io.BytesIO(image)) as opened:
        grey = opened.convert("L").resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)
    vector = np.asarray(grey, dtype=np.float32).ravel()
    vector = vector - vector.mean()
    return vector / max(float(np.linalg.norm(vector)), 1e-6)
