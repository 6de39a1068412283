"""A bundle with the call and the answers of transformers' classification pipelines: existing code changes one line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from massmerge.errors import InputError
from massmerge.model.answers import Prediction
from massmerge.model.load import load
from massmerge.model.model import Model

_NOT_GIVEN = ""  # transformers tells `top_k=None`, all labels, from no `top_k` in this way
_IMAGE_LABELS = 5
_KINDS = ("text-classification", "sentiment-analysis", "image-classification")


class Pipeline:
    """A loaded bundle that is called like a pipeline of transformers. `pipeline` makes one.

    Args:
        model: the bundle.
        batch_size: how many inputs run at once.
        top_k: how many labels each answer has; as in transformers by default.
    """

    def __init__(self, model: Model, *, batch_size: int = 32, top_k: int | str | None = _NOT_GIVEN) -> None:
        self.model, self._batch_size, self._top_k = model, batch_size, top_k
        self.task = "image-classification" if model.takes_images else "text-classification"

    def __call__(
        self,
        inputs: Any,
        *,
        top_k: int | str | None = _NOT_GIVEN,
        task: str | list[str] | None = None,
        batch_size: int | None = None,
        truncation: bool = True,
        padding: bool = True,
    ) -> Any:
        """Classify one input, a list, or any other iterable or data set, which is answered one by one as it is read.

        Args:
            inputs: texts, `{"text": …, "text_pair": …}`, images, or paths of images.
            top_k: how many labels of the task that answers; None for all of them, and for the best five of an image.
            task: a task's name to skip routing, or several to choose among.
            batch_size: how many inputs run at once.
            truncation: for calls that give it; a bundle always cuts what its base cannot read.
            padding: likewise; a bundle always pads its batches.

        Returns:
            What transformers returns for the same call, `{"label": …, "score": …}`, with `"task"` beside: for one text a
            list, for a list of texts a list of these, and with `top_k` lists of them; for images always lists.
        """
        wanted = self._top_k if top_k == _NOT_GIVEN else top_k
        if not (wanted is None or wanted == _NOT_GIVEN or (isinstance(wanted, int) and wanted >= 1)):
            raise InputError(f"top_k is a positive number, or None for all labels, not {wanted!r}.")
        if not (truncation and padding):
            raise InputError("a bundle always pads and truncates: leave out truncation and padding, or make them True.")
        if wanted is None and self.model.takes_images:
            wanted = _NOT_GIVEN
        if isinstance(inputs, Dataset) and not isinstance(inputs, Iterable):
            inputs = map(inputs.__getitem__, range(len(inputs)))  # type: ignore[arg-type]
        one = isinstance(inputs, str | Path | Mapping) or not isinstance(inputs, Iterable)
        found = self._answers([inputs] if one else inputs, wanted, task, batch_size or self._batch_size)
        if not one:
            return list(found) if isinstance(inputs, list | tuple) else found
        answer = next(iter(found))
        # A single text comes as a list even with one label, unless the call itself names `top_k`: so it is in transformers.
        return [answer] if isinstance(inputs, str) and not self.model.takes_images and top_k == _NOT_GIVEN else answer

    def _answers(
        self, inputs: Iterable[Any], top_k: int | str | None, task: str | list[str] | None, batch_size: int
    ) -> Iterator[Any]:
        most = max((len(labels) for labels in self.model.labels.values()), default=1) * len(self.model.tasks)
        predictions = self.model.stream(map(_item, inputs), task=task, top=most, batch_size=batch_size)
        for prediction in predictions:
            rows = _rows(prediction)
            if top_k == _NOT_GIVEN:
                yield rows[:_IMAGE_LABELS] if self.model.takes_images else rows[0]
            else:
                yield rows if top_k is None else rows[: int(top_k)]


def _item(given: Any) -> Any:
    """An input of a pipeline as one of ours; a pair of texts is a dictionary there and a tuple here."""
    if isinstance(given, Mapping) and "text" in given:
        return (given["text"], given["text_pair"]) if given.get("text_pair") is not None else given["text"]
    return given


def _rows(prediction: Prediction) -> list[dict[str, Any]]:
    """The labels of the task that answers, the most probable first."""
    if prediction.task is None:
        return [{"label": None, "score": 0.0, "task": None}]
    given: list[Any] = [] if prediction.label is None else [prediction]
    ranked = [one for one in (*given, *prediction.alternatives) if one.task == prediction.task]
    scores = [one.score if one.value is None else one.value for one in ranked]
    rows = [{"label": o.label, "score": s, "task": o.task} for o, s in zip(ranked, scores, strict=True)]
    return sorted(rows, key=lambda row: -float(row["score"] or 0.0))


def pipeline(
    task: str | Path | Model | None = None,
    model: str | Path | Model | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    batch_size: int = 32,
    top_k: int | str | None = _NOT_GIVEN,
) -> Pipeline:
    """A bundle in the place of `transformers.pipeline("text-classification", …)` or `("image-classification", …)`.

    Args:
        task: the bundle; or as in transformers the name of the pipeline, and the bundle as `model`.
        model: the bundle's folder, its hub id, or a loaded model.
        device: as in `load`.
        dtype: as in `load`.
        batch_size: how many inputs run at once.
        top_k: how many labels each answer has; as in transformers by default.

    Raises:
        InputError: not a bundle, or one whose inputs or answers are of another kind than `task` says.
    """
    kind, given = (None, task) if model is None else (task, model)
    if given is None:
        raise InputError('name a bundle: mm.pipeline("bundle").')
    opened = given if isinstance(given, Model) else load(given, device=device, dtype=dtype)
    if opened.writes:
        raise InputError("this bundle answers with texts, not with labels. Use `load` and `Model.generate`.")
    made = Pipeline(opened, batch_size=batch_size, top_k=top_k)
    if kind is not None and (kind not in _KINDS or opened.takes_images != (kind == "image-classification")):
        raise InputError(f"this bundle is for {made.task}, not {kind!r}.")
    return made
