"""The rows of a stream in columns: about 150 bytes each, where an object each takes 700."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

from massmerge.evaluation.metrics import Given
from massmerge.evaluation.results import RowResult

_NONE = -1
_NOT_GIVEN = Given()


class _Words:
    """Texts by number: rows repeat the names of tasks and labels."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int:
        """The number that stands for a text."""
        if text is None:
            return _NONE
        if text not in self._numbers:
            self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return self._numbers[text]

    def text(self, number: int) -> str | None:
        """The text that a number stands for."""
        return None if number == _NONE else self._texts[number]


class _Answers:
    """A column of answers as far as they are scored. Behind its last answer it takes no room: few columns are used."""

    def __init__(self, words: _Words) -> None:
        self._words = words
        self._names, self._scores = array("i"), array("d")

    def __getitem__(self, place: int) -> Given:
        if place >= len(self._scores):
            return _NOT_GIVEN
        task, label = self._names[2 * place : 2 * place + 2]
        score = self._scores[place]
        return Given(self._words.text(task), self._words.text(label), None if math.isnan(score) else score)

    def __setitem__(self, place: int, given: Given) -> None:
        missing = place + 1 - len(self._scores)
        self._names.extend([_NONE] * (2 * missing))
        self._scores.extend([math.nan] * missing)
        self._names[2 * place], self._names[2 * place + 1] = map(self._words.number, given[:2])
        self._scores[place] = math.nan if given.score is None else given.score


class RowTable(Sequence[RowResult]):
    """Rows in the order of the stream. What is read is a copy; later answers are put into a column: `rows.known[3] = …`."""

    def __init__(self) -> None:
        self._words = _Words()
        self._tasks, self._places, self._labels = array("i"), array("q"), array("i")
        self.given, self.known, self.expert, self.once, self.once_known = (_Answers(self._words) for _ in range(5))
        self._sets, self._set_numbers = list[tuple[str, ...]](), dict[tuple[str, ...], int]()
        self._selected, self._sure = array("i"), array("d")
        self._residuals, self._ends = array("f"), array("q", [0])
        self._errors: dict[int, str] = {}

    def append(self, row: RowResult) -> None:
        """Put a row behind the others."""
        if row.error is not None:
            self._errors[len(self)] = row.error
        if row.selected not in self._set_numbers:
            self._set_numbers[row.selected] = len(self._sets)
            self._sets.append(row.selected)
        self._selected.append(self._set_numbers[row.selected])
        self._labels.append(self._words.number(row.label))
        self._places.append(row.place)
        self._sure.append(math.nan if row.confidence is None else row.confidence)
        self._residuals.extend(row.residuals)
        self._ends.append(len(self._residuals))
        for column, given in (
            (self.given, row.given), (self.known, row.known), (self.expert, row.expert), (self.once, row.once),
            (self.once_known, row.once_known),
        ):  # fmt: skip
            if given != _NOT_GIVEN:
                column[len(self)] = given
        self._tasks.append(self._words.number(row.task))

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, place: int) -> RowResult: ...
    @overload
    def __getitem__(self, place: slice) -> list[RowResult]: ...
    def __getitem__(self, place: int | slice) -> RowResult | list[RowResult]:
        """A row, or some of them."""
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        i = range(len(self))[place]
        sure = self._sure[i]
        return RowResult(
            self._words.text(self._tasks[i]) or "", self._places[i], self._words.text(self._labels[i]) or "",
            self.given[i], self._sets[self._selected[i]], self._residuals[self._ends[i] : self._ends[i + 1]],
            self._errors.get(i), self.known[i], self.expert[i], None if math.isnan(sure) else sure, self.once[i],
            self.once_known[i],
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowTable) and len(self) == len(other) and all(map(RowResult.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def of_task(self, task: str) -> TaskRows:
        """The rows of one task, by their places among them."""
        number = self._words.number(task)
        found = [i for i, own in enumerate(self._tasks) if own == number]
        return TaskRows(self, array("q", sorted(found, key=self._places.__getitem__)))


class TaskRows(Sequence[RowResult]):
    """Some rows of a table, made when they are looked at."""

    def __init__(self, table: RowTable, positions: array[int]) -> None:
        self._table, self.positions = table, positions

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, place: int) -> RowResult: ...
    @overload
    def __getitem__(self, place: slice) -> list[RowResult]: ...
    def __getitem__(self, place: int | slice) -> RowResult | list[RowResult]:
        """A row, or some of them."""
        if isinstance(place, slice):
            return [self._table[i] for i in self.positions[place]]
        return self._table[self.positions[place]]

    def __iter__(self) -> Iterator[RowResult]:
        return (self._table[i] for i in self.positions)
