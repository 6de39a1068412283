"""From scores to selected sets: standardise, softmax, threshold, at most K, the best task if none passes."""

from __future__ import annotations

import torch
from torch import Tensor

_FLAT = 1e-6  # a spread below this share of the scores' size is rounding, not evidence


def standardize(residuals: Tensor) -> Tensor:
    """Residuals (…, T) standardised over the tasks of each input; zero where all tasks are alike, or there is one."""
    if residuals.shape[-1] < 2:
        return torch.zeros_like(residuals)
    centred = residuals - residuals.mean(-1, keepdim=True)
    spread = centred.square().sum(-1, keepdim=True).div(residuals.shape[-1] - 1).sqrt()
    flat = spread <= _FLAT * residuals.abs().amax(-1, keepdim=True)
    return torch.where(flat, 0.0, centred / spread.clamp_min(torch.finfo(residuals.dtype).tiny))


def vote(residuals: list[Tensor]) -> Tensor:
    """One residual (batch, T) from several voters: the sum of the residuals standardised per voter; one voter is itself.

    Two standardised numbers say which is less and not by how much, and an even number of voters could tie. Between two
    tasks the differences count instead, as shares of the residuals' size.
    """
    if len(residuals) == 1:
        return residuals[0]
    stacked = torch.stack(residuals)
    if stacked.shape[-1] != 2:
        return standardize(stacked).sum(0)
    size = stacked.abs().mean(-1, keepdim=True).clamp_min(torch.finfo(stacked.dtype).tiny)
    return ((stacked - stacked.mean(-1, keepdim=True)) / size).sum(0)


def agreements(residuals: list[Tensor], best: list[int]) -> list[float]:
    """How far voters agree on an input's best task: its mean standardised residual, as a share of the greatest possible."""
    count = residuals[0].shape[1]
    if count < 2:
        return [1.0] * len(best)
    together = standardize(torch.stack(residuals)).mean(0)
    greatest = (count - 1) / count**0.5
    found: list[float] = (-together.gather(1, torch.tensor(best)[:, None])[:, 0] / greatest).clamp(0, 1).tolist()
    return found


def margins(residuals: list[Tensor]) -> list[float]:
    """How far the best of several tasks is ahead of the next: the difference of their mean standardised residuals."""
    best = standardize(torch.stack(residuals)).mean(0).topk(2, largest=False).values
    found: list[float] = (best[:, 1] - best[:, 0]).tolist()
    return found


def weigh(residuals: Tensor, *, standardized: bool = True, temperature: float = 1.0) -> Tensor:
    """Weights (batch, T): softmax of the negative residuals, by default standardised first.

    The paper prints plain softmax(−r), whose result depends on the scale of the activations; the authors' code
    standardises, and the threshold 0.2 means something only then.
    """
    scores = standardize(residuals) if standardized else residuals
    return torch.softmax(-scores / temperature, 1)


def select(weights: Tensor, threshold: float, top_k: int) -> list[list[int]]:
    """For each input the tasks with weight ≥ `threshold`, at most `top_k`, best first; the best task if none passes.

    Args:
        weights: (batch, T).
        threshold: η.
        top_k: K.
    """
    # Equal weights keep the order of the recipe, so that the answer does not hang on the sort's mood.
    order = torch.argsort(weights, dim=1, descending=True, stable=True)[:, :top_k]
    kept = weights.gather(1, order) >= threshold
    kept[:, 0] = True
    return [
        [task for task, keep in zip(row, keeps, strict=True) if keep]
        for row, keeps in zip(order.tolist(), kept.tolist(), strict=True)
    ]
