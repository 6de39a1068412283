"""What a study is, and what one finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from massmerge.evaluation.report import Part

if TYPE_CHECKING:
    from massmerge.research.studies.context import StudyContext


TIMED = "it measures what an answer costs, which only one process tells."
PASSES = "it is made of first passes, whose activations stay in one process."


@dataclass(frozen=True)
class Verdict:
    """The best method, and how MASS compares."""

    measure: str
    """What was compared, such as `routing accuracy, mean over the tasks`."""
    best: str
    best_value: float
    mass: str
    """Which row is MASS as it is shipped."""
    mass_value: float
    margin: float = 0.0
    """Half of the 95 % interval of such a figure: a smaller difference is no difference."""
    why: str = ""
    """Where MASS is not the best: the reason, from measured figures."""

    @property
    def won(self) -> bool:
        """Whether no other row is better."""
        return self.mass_value >= self.best_value

    @property
    def tied(self) -> bool:
        """Whether the best row is better by less than the rows that were drawn decide."""
        return not self.won and self.best_value - self.mass_value <= self.margin


@dataclass(frozen=True)
class Finding:
    """What a study found."""

    rows: Sequence[dict[str, Any]]
    """The figures as plain data. They depend on nothing but bundle, data, options and seed: a second run gives the same."""
    verdict: Verdict
    sentences: Sequence[str]
    """What a reader should take away, from these figures."""
    parts: Sequence[Part]
    """Tables and plots of the figures."""
    times: Sequence[dict[str, Any]] = field(default_factory=list)
    """What differs from run to run: seconds and the like."""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Study:
    """An experiment that can be asked for by name."""

    name: str
    title: str
    question: str
    """What is compared, in one sentence."""
    run: Callable[[StudyContext], Finding]
    seconds: Callable[[StudyContext], float]
    """About how long it takes from nothing; cells that are finished make it shorter."""
    needs_recipe: bool = False
    """Whether experts are merged again, or read."""
    needs_validation: bool = False
    """Whether inputs of the split `validation` are needed beside those that are measured."""
    not_for_texts: str = ""
    """Why it says nothing of models that write, which have no heads."""
    here: str = ""
    """Why an engine cannot answer its rows; empty where it can, of studies that ask for answers by given sets."""
    peers: tuple[str, ...] = ()
    """The routed peers that it compares, whose options can be set."""
    quick: tuple[str, str] | None = None
    """Title and question of a quick run, where it compares less."""

    def as_asked(self, *, quick: bool) -> Study:
        """The study under the title and question that fit what it compares."""
        return replace(self, title=self.quick[0], question=self.quick[1]) if quick and self.quick else self
