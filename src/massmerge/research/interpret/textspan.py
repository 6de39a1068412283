"""TextSpan: which texts of a bank lie along the directions in which a task's singular vectors differ most."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_RANK_TOLERANCE = 1e-6


class Pick(NamedTuple):
    """One text of the bank."""

    position: int
    """Its place in the bank."""
    score: float
    """Standard deviation of the vectors along the text, in what earlier picks have left."""
    share: float
    """Share of the vectors' variance that lies along the text and along no earlier pick."""


@torch.inference_mode()
def text_span(vectors: Tensor, texts: Tensor, top: int) -> list[Pick]:
    """The texts that explain most of the variance of a task's vectors, greedily, best first.

    Args:
        vectors: `diag(s) V` (k, d), the task's singular vectors by their strength, in the space of the texts.
        texts: the bank (n, d), rows of length 1.
        top: how many texts to pick; fewer where the vectors span fewer dimensions.

    Each pick's direction is taken out of vectors and texts before the next.
    """
    vectors, texts = vectors.double(), texts.double()
    basis = _row_space(vectors)
    texts, vectors = (
        texts @ basis.mT,
        vectors @ basis.mT,
    )  # coordinates in the row space: same products, fewer dimensions
    vectors = vectors - vectors.mean(0)
    total = float(vectors.square().sum())
    smallest = _RANK_TOLERANCE * float(texts.norm(dim=1).max()) if len(texts) else 0.0
    picks: list[Pick] = []
    for _ in range(min(top, texts.shape[1])):
        spread = (vectors @ texts.mT).std(0, correction=0)
        spread[texts.norm(dim=1) <= smallest] = -1.0  # what lies along earlier picks has no direction of its own
        best = int(spread.argmax())
        if spread[best] < 0 or total == 0:
            break
        along = texts[best] / texts[best].norm()
        picks.append(Pick(best, float(spread[best]), float((vectors @ along).square().sum()) / total))
        vectors = vectors - torch.outer(vectors @ along, along)
        texts = texts - torch.outer(texts @ along, along)
        texts[best] = 0.0
    return picks


def _row_space(vectors: Tensor) -> Tensor:
    """An orthonormal basis (r, d) of what the rows span; rows may be more than dimensions."""
    _, s, v = torch.linalg.svd(vectors, full_matrices=False)
    return v[s > _RANK_TOLERANCE * s[0]] if len(s) else v
