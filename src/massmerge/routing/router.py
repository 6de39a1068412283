"""What every router is: what all voters of a look see in, scores of the tasks out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from massmerge.routing.activation import Activation

if TYPE_CHECKING:
    from massmerge.routing.projection import ProjectionRouter


@dataclass(frozen=True)
class Scores:
    """What a router says of some inputs.

    Attributes:
        opinions: scores (inputs, T), less is better: one for each voter, or a single one of all voters together.
        lifts: how many times as much of each activation a task holds as chance would (inputs, T), as `mean_lift` counts
            the voters; none where the router cannot tell.
        probable: whether the opinion is a negative log-probability, whose size counts; else scores are compared with those
            of the same input only.
    """

    opinions: list[Tensor]
    lifts: Tensor | None = None
    probable: bool = False


class Router(ABC):
    """Scores what all voters of a look see."""

    @abstractmethod
    def __call__(self, seen: list[Activation]) -> Scores:
        """What it says of a batch, from what each voter sees of it."""


class RouterKind(ABC):
    """How routers of one kind are fitted, kept and made."""

    needs_fit = True
    """Whether it is fitted on inputs of each task (`mass calibrate`) before it can be loaded."""
    needs_names = True
    """Whether the task of the inputs that it is fitted on must be known."""
    probable = False
    """Whether its one opinion is a negative log-probability (`Scores.probable`)."""
    second_look = False
    """Whether inputs that are unclear at the first look are looked at a second time by it."""

    @abstractmethod
    def fit(
        self, voters: Sequence[str], seen: list[Tensor], owners: Tensor, subspaces: list[ProjectionRouter]
    ) -> dict[str, Tensor]:
        """What is kept of some inputs.

        Args:
            voters: their names.
            seen: what each voter sees of the inputs (n, width).
            owners: task of each input (n,).
            subspaces: the tasks' for each voter.
        """

    @abstractmethod
    def missing(self, voters: Sequence[str], kept: Iterable[str]) -> list[str]:
        """The voters for which there is nothing among the names of what was kept."""

    @abstractmethod
    def load(self, voters: Sequence[str], kept: dict[str, Tensor], subspaces: list[ProjectionRouter]) -> Router:
        """The router of what `fit` has kept."""


def place_of(voters: Sequence[str]) -> str:
    """The name of what voters keep together: that of the first and of the last."""
    return f"{voters[0]}-{voters[-1]}"
