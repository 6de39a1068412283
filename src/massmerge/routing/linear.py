"""A router of all voters together: multinomial logistic regression on what they see and on the vote of the residuals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, normalize

from massmerge.routing.activation import Activation
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.router import Router, RouterKind, Scores, place_of
from massmerge.routing.selection import standardize

# Chosen on validation rows of the text suite, 16 to 400 inputs a task; see docs/research/routing.md.
_SHRINKAGE = 0.5
_RIDGE = 2e-5
_VOTE = 0.3  # size of the vote beside activations of length 1: what counts much is penalised little
_STEPS = 200


def residual_vote(units: list[Tensor], subspaces: list[ProjectionRouter]) -> Tensor:
    """The mean standardised residual of all voters (n, T), from what each sees (n, width)."""
    return standardize(torch.stack([own(z) for own, z in zip(subspaces, units, strict=True)])).mean(0)


def whitener(units: Tensor, owners: Tensor, tasks: int) -> Tensor:
    """`Σ^-½` (d, d) of the scatter within tasks, shrunk: directions in which inputs of one task differ count less."""
    means = torch.stack([units[owners == t].mean(0) for t in range(tasks)])
    scatter = units - means[owners]
    covariance = scatter.mT @ scatter / len(units)
    variance = covariance.diagonal().mean().clamp_min(1e-12)
    shrunk = (1 - _SHRINKAGE) * covariance + _SHRINKAGE * variance * torch.eye(len(covariance))
    values, vectors = torch.linalg.eigh(shrunk)
    return (vectors * values.clamp_min(1e-12).rsqrt()) @ vectors.mT


def fit_logistic(features: Tensor, owners: Tensor, tasks: int, ridge: float = _RIDGE) -> tuple[Tensor, Tensor]:
    """Weight (T, d) and bias (T,) with the least mean cross-entropy, every task counting alike, plus ½ ridge ‖weight‖²."""
    weight = torch.zeros(tasks, features.shape[1], requires_grad=True)
    bias = torch.zeros(tasks, requires_grad=True)
    counts = len(owners) / (tasks * torch.bincount(owners, minlength=tasks).clamp_min(1))
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, history_size=10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = cross_entropy(features @ weight.mT + bias, owners, counts) + ridge / 2 * weight.square().sum()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


class LinearRouter(Router):
    """One opinion of all voters together: negative log-probabilities.

    Args:
        weight: (T, sum of the voters' widths), on activations of length 1, voter by voter.
        vote: (T, T), on the vote of the residuals.
        bias: (T,).
        subspaces: the tasks' for each voter.
    """

    def __init__(self, weight: Tensor, vote: Tensor, bias: Tensor, subspaces: list[ProjectionRouter]) -> None:
        self._weight, self._vote, self._bias, self._subspaces = weight, vote, bias, subspaces

    def __call__(self, seen: list[Activation]) -> Scores:
        """What all voters say together."""
        units = [normalize(activation.pooled(), dim=1) for activation in seen]
        logits = torch.cat(units, 1) @ self._weight.mT + self._bias
        return Scores([-log_softmax(logits + residual_vote(units, self._subspaces) @ self._vote.mT, 1)], probable=True)


class Linear(RouterKind):
    """One router for all voters, kept under the names of the first and the last."""

    probable, second_look = True, True

    def fit(
        self, voters: Sequence[str], seen: list[Tensor], owners: Tensor, subspaces: list[ProjectionRouter]
    ) -> dict[str, Tensor]:
        """The weights; whitening and centring are taken in, so that the router reads activations of length 1."""
        tasks = len(subspaces[0].ranks)
        units = [normalize(z, dim=1) for z in seen]
        vote = residual_vote(units, subspaces)
        centres = [u.mean(0) for u in units]
        size = sum(u.shape[1] for u in units) ** 0.5
        whiteners = [whitener(u, owners, tasks) / size for u in units]
        parts = [(u - c) @ w for u, c, w in zip(units, centres, whiteners, strict=True)]
        weight, bias = fit_logistic(torch.cat([*parts, _VOTE * vote], 1), owners, tasks)
        *own, counted = torch.split(weight, [*(u.shape[1] for u in units), tasks], dim=1)
        folded = torch.cat([part @ w for part, w in zip(own, whiteners, strict=True)], 1)
        kept = {"weight": folded, "vote": _VOTE * counted, "bias": bias - folded @ torch.cat(centres)}
        return {f"{place_of(voters)}.{name}": tensor.contiguous() for name, tensor in kept.items()}

    def missing(self, voters: Sequence[str], kept: Iterable[str]) -> list[str]:
        """All voters, if the router was fitted for others."""
        return [] if f"{place_of(voters)}.weight" in list(kept) else list(voters)

    def load(self, voters: Sequence[str], kept: dict[str, Tensor], subspaces: list[ProjectionRouter]) -> LinearRouter:
        """The router of these weights."""
        weight, vote, bias = (kept[f"{place_of(voters)}.{name}"] for name in ("weight", "vote", "bias"))
        return LinearRouter(weight, vote, bias, subspaces)
