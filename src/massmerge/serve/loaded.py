"""A bundle that is loaded and warmed, with its description."""

from __future__ import annotations

import base64
import io
import mimetypes
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image

import massmerge
from massmerge.bundle.inspect import Inspection, inspect_bundle
from massmerge.bundle.reader import Bundle
from massmerge.errors import InputError
from massmerge.io.allocator import keep_buffers
from massmerge.io.rows import NamedInput, read_inputs
from massmerge.model.load import load, load_routing
from massmerge.model.routing_model import RoutingModel
from massmerge.serve.errors import ServiceError
from massmerge.serve.settings import ServiceSettings

_MOST_EXAMPLES = 24
Answers = Literal["labels", "text", "tasks"]
_INSTEAD = {
    "labels": "This bundle answers with labels: use /v1/predict.",
    "text": "This bundle answers with text: use /v1/chat/completions or /v1/completions.",
    "tasks": "This service only names tasks: use /v1/route.",
}
_EXAMPLE_SIDE = 512  # pixels; a larger example is sent to the page smaller


@dataclass(frozen=True)
class Loaded:
    """What answers, and what is said about it."""

    model: RoutingModel
    report: Inspection
    router: dict[str, Any]
    examples: list[dict[str, str]]
    at: float
    answers: Answers = "labels"
    """What inputs are answered with."""

    def refuse_unless(self, answers: Answers) -> None:
        """Raise an error that names the right endpoint if inputs are answered with something else."""
        if self.answers != answers:
            raise ServiceError(404, "not_served", _INSTEAD[self.answers])

    @property
    def kind(self) -> str:
        """The kind of input."""
        return "image" if self.model.takes_images else "text"

    @property
    def chats(self) -> bool:
        """Whether the base has a chat template."""
        reader = self.model.core.reader
        return not reader.image and reader.has_processor and bool(getattr(reader.processor, "chat_template", None))

    def tasks(self) -> list[dict[str, Any]]:
        """The tasks, as `/v1/tasks` answers them."""
        return [
            {
                "name": task.name, "labels": None if task.labels is None else list(task.labels), "bytes": task.nbytes,
                "problem_type": task.problem_type, "form": task.form, "rank": [task.rank_low, task.rank_high],
                "energy": task.energy,
            }
            for task in self.report.tasks
        ]  # fmt: skip

    def describe(self, settings: ServiceSettings) -> dict[str, Any]:
        """The bundle, as `/v1/bundle` answers it."""
        report = self.report
        return {
            "name": settings.model_name,
            "kind": self.kind,
            "answers": self.answers,
            "chat": self.chats,
            "base": {"source": report.base, "class": report.base_class, "bytes": report.base_bytes},
            "tasks": self.tasks(),
            "sizes": report.sizes,
            "ratio": report.ratio,
            "similarity": report.similarity,
            "overlap": report.overlap,
            "overlap_by_chance": report.overlap_by_chance,
            "examples": self.examples,
            "router": self.router,
            "limits": {
                "items": settings.max_items, "characters": settings.max_text, "pixels": settings.max_pixels,
                "request_pixels": settings.max_request_pixels, "body_bytes": settings.max_body, "seconds": settings.timeout,
            },
            "versions": {
                "massmerge": massmerge.__version__, "torch": torch.__version__, "transformers": version("transformers"),
            },
        }  # fmt: skip


def load_bundle(settings: ServiceSettings) -> Loaded:
    """Load a bundle, compare its checksums, and answer once with each task so that the first client need not wait.

    Raises:
        InputError: not a bundle, damaged, or one whose tasks have no heads; or examples that cannot be read.
    """
    keep_buffers()
    model, answers = _load_and_warm(settings)
    bundle = Bundle(settings.bundle, check=False)
    in_force = {"kind": settings.router or bundle.router_kind, "top_k": model.top_k, "voters": model.voters}
    router = {**bundle.recipe.router.model_dump(mode="json"), **in_force}
    return Loaded(model, inspect_bundle(bundle), router, _examples(settings, model), time.time(), answers)


def _load_and_warm(settings: ServiceSettings) -> tuple[RoutingModel, Answers]:
    """The model, which has answered once with each task."""
    options: dict[str, Any] = {"router": settings.router, "device": settings.device, "dtype": settings.dtype}
    options |= {"check": True, "mapped": settings.mapped}
    if settings.route_only:
        part = load_routing(settings.bundle, **options)
        part.route([_warm(part)])
        return part, "tasks"
    model = load(settings.bundle, cache=settings.cache, **options)
    warm = _warm(model)
    if model.writes:
        model.route([warm])
        for task in model.tasks:
            model.generate([warm], task=task, max_new_tokens=2, on_error="row")
        return model, "text"
    model.predict([warm], on_error="row")
    for task in model.labels:
        model.predict([warm], task=task, on_error="row")
    return model, "labels"


def _warm(model: RoutingModel) -> Any:
    return model.read(Image.new("RGB", (64, 64)) if model.takes_images else "warm")


def _examples(settings: ServiceSettings, model: RoutingModel) -> list[dict[str, str]]:
    """What the page offers to try."""
    if settings.examples is None:
        return []
    found: list[dict[str, str]] = []
    for named in read_inputs([str(settings.examples)], image=model.takes_images, column=settings.column):
        if isinstance(named.item, InputError):
            raise named.item
        if len(found) == _MOST_EXAMPLES:
            break
        found.append({"image": _data_url(named)} if model.takes_images else {"text": str(named.item)})
    return found


def _data_url(named: NamedInput) -> str:
    """An image as a data URL: a small file as it is, all else as PNG, scaled down if it is large."""
    file = None if isinstance(named.item, Image.Image) else Path(named.item)
    try:
        with Image.open(file) if file else named.item as image:
            if file and max(image.size) <= _EXAMPLE_SIDE:
                kind, data = mimetypes.guess_type(file.name)[0] or "image/png", file.read_bytes()
            else:
                image.thumbnail((_EXAMPLE_SIDE, _EXAMPLE_SIDE))
                buffer = io.BytesIO()
                image.convert("RGB").save(buffer, "PNG")
                kind, data = "image/png", buffer.getvalue()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{named.name}: not a readable image ({error}).") from None
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
