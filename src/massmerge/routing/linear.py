"""A router of all voters together: multinomial logistic regression on what they see and on the vote of the residuals.

The fewer inputs there are, the more the vote of the prototypes counts beside it: both err, but seldom on the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax, normalize

from massmerge.routing.activation import Activation
from massmerge.routing.per_voter import PerVoter
from massmerge.routing.projection import ProjectionRouter
from massmerge.routing.prototype import PrototypeRouter
from massmerge.routing.router import Router, RouterKind, Scores, place_of
from massmerge.routing.selection import standardize

# Chosen on validation rows of the text suite, 16 to 400 inputs a task; see docs/research/routing.md.
_SHRINKAGE = 0.5
_RIDGE = 2e-5
_VOTE = 0.3  # size of the vote beside activations of length 1: what counts much is penalised little
_STEPS = 200
_PROTOTYPES = 128.0  # what the vote of the prototypes counts, times the inputs of a task


def vote(scores: Sequence[Tensor]) -> Tensor:
    """The mean standardised score of all voters (n, T); less is better."""
    return standardize(torch.stack(list(scores))).mean(0)


def residuals_of(units: Sequence[Tensor], subspaces: Sequence[ProjectionRouter]) -> list[Tensor]:
    """Residuals (n, T) for each voter, from what it sees (n, width)."""
    return [own(z) for own, z in zip(subspaces, units, strict=True)]


def residual_vote(units: Sequence[Tensor], subspaces: Sequence[ProjectionRouter]) -> Tensor:
    """The vote of the residuals, from what each voter sees (n, width)."""
    return vote(residuals_of(units, subspaces))


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
        """The loss at the current weights, with its gradients."""
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
        kept: `weight` (T, sum of the voters' widths), on activations of length 1, voter by voter; `vote` (T, T), on the vote
            of the residuals; `bias` (T,); and `share`, what the prototypes' vote counts, which older bundles have not.
        prototypes: for each voter; none without a share.
        subspaces: the tasks' for each voter.
    """

    def __init__(
        self, kept: dict[str, Tensor], prototypes: list[PrototypeRouter], subspaces: list[ProjectionRouter]
    ) -> None:
        self._kept, self._prototypes, self._subspaces = kept, prototypes, subspaces

    def __call__(self, seen: list[Activation]) -> Scores:
        """What all voters say together."""
        kept, units = self._kept, [normalize(activation.pooled(), dim=1) for activation in seen]
        residuals = residuals_of(units, self._subspaces)
        logits = torch.cat(units, 1) @ kept["weight"].mT + kept["bias"] + vote(residuals) @ kept["vote"].mT
        if self._prototypes:
            near = vote([p.beside(*each) for p, *each in zip(self._prototypes, units, residuals, strict=True)])
            logits = log_softmax(logits, 1) - kept["share"] * near
        return Scores([-log_softmax(logits, 1)], probable=True)


class Linear(RouterKind):
    """One router for all voters, kept under the names of the first and the last; and prototypes under the name of each."""

    probable, second_look = True, True

    def fit(
        self, voters: Sequence[str], seen: list[Tensor], owners: Tensor, subspaces: list[ProjectionRouter]
    ) -> dict[str, Tensor]:
        """The weights; whitening and centring are taken in, so that the router reads activations of length 1."""
        tasks = len(subspaces[0].ranks)
        units = [normalize(z, dim=1) for z in seen]
        centres = [u.mean(0) for u in units]
        size = sum(u.shape[1] for u in units) ** 0.5
        whiteners = [whitener(u, owners, tasks) / size for u in units]
        parts = [(u - c) @ w for u, c, w in zip(units, centres, whiteners, strict=True)]
        seen_by_all = torch.cat([*parts, _VOTE * residual_vote(units, subspaces)], 1)
        weight, bias = fit_logistic(seen_by_all, owners, tasks)
        *own, counted = torch.split(weight, [*(u.shape[1] for u in units), tasks], dim=1)
        folded = torch.cat([part @ w for part, w in zip(own, whiteners, strict=True)], 1)
        kept = {
            "weight": folded, "vote": _VOTE * counted, "bias": bias - folded @ torch.cat(centres),
            "share": torch.tensor(_PROTOTYPES * tasks / len(owners)),
        }  # fmt: skip
        found = {f"{place_of(voters)}.{name}": tensor.contiguous() for name, tensor in kept.items()}
        return found | _PROTOTYPE.fit(voters, seen, owners, subspaces)

    def missing(self, voters: Sequence[str], kept: Iterable[str]) -> list[str]:
        """All voters, if the router was fitted for others."""
        return [] if f"{place_of(voters)}.weight" in list(kept) else list(voters)

    def load(self, voters: Sequence[str], kept: dict[str, Tensor], subspaces: list[ProjectionRouter]) -> LinearRouter:
        """The router of these weights."""
        place = f"{place_of(voters)}."
        own = {name.removeprefix(place): tensor for name, tensor in kept.items() if name.startswith(place)}
        prototypes = [
            PrototypeRouter.load({n: kept[f"{voter}.{n}"] for n in ("weight", "offset", "scales")}, subspace)
            for voter, subspace in zip(voters, subspaces, strict=True)
            if "share" in own
        ]
        return LinearRouter(own, prototypes, subspaces)


_PROTOTYPE = PerVoter(PrototypeRouter)
