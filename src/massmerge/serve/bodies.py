"""From predictions to what clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

from massmerge.model.answers import Answer, Prediction
from massmerge.model.explain import heads_of
from massmerge.serve.batching import BatchKey, Fault, Outcome
from massmerge.serve.errors import ServiceError
from massmerge.serve.schemas import HuggingFaceParameters, Options, RouteRequest

EVERYTHING = 10_000  # labels; an explanation shows the best of each head


def choice_of(options: Options | HuggingFaceParameters | RouteRequest, request_id: str, known: list[str]) -> BatchKey:
    """What a request's inputs must share with others to run with them.

    Raises:
        ServiceError: it names tasks twice over, or ones that are not there.
    """
    task = None if isinstance(options, RouteRequest) else options.task
    if task is not None and options.tasks is not None:
        raise ServiceError(422, "invalid", "Give task or tasks, not both.")
    names = [task] if task is not None else options.tasks
    if names is not None and (unknown := [name for name in names if name not in known]):
        shown = ", ".join(repr(name[:60]) for name in unknown[:5])
        raise ServiceError(422, "unknown_task", f"There is no task {shown}. Choose from {', '.join(known)}.")
    tasks = None if names is None else tuple(name for name in known if name in names)
    if isinstance(options, RouteRequest):
        return BatchKey(tasks, only_route=True)
    if isinstance(options, Options) and options.route == "batch":
        if options.session is not None:
            raise ServiceError(422, "invalid", "Give session or route: batch, not both.")
        return BatchKey(tasks, "batch", request_id)
    return BatchKey(tasks)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A body as JSON, which knows neither NaN nor infinity."""
    return Response(to_json(body, inf_nan_mode="null"), status, headers, media_type="application/json")


def status_of(outcomes: Sequence[Outcome]) -> int:
    """200 if anything was answered; 422 if all inputs are bad; 500 if it was the service's fault."""
    codes = [outcome.result.code for outcome in outcomes if isinstance(outcome.result, Fault)]
    if len(codes) < len(outcomes):
        return 200
    return 500 if "internal" in codes else 422


def prediction_body(outcome: Outcome, options: Options) -> dict[str, Any]:
    """One input's answer."""
    result = outcome.result
    if isinstance(result, Fault):
        none = dict.fromkeys(("task", "label", "confidence", "score", "labels", "scores", "value"))
        empty = {"heads": {}, "alternatives": [], "selected": [], "truncated": False, "explain": None}
        return {**none, **empty, "error": {"code": result.code, "message": result.message}}
    return {
        "task": result.task,
        "label": result.label,
        "confidence": result.confidence,
        "score": result.score,
        "labels": result.labels,
        "scores": result.scores,
        "value": result.value,
        "heads": {name: _head(one) for name, one in result.heads.items()},
        "alternatives": [{"task": a.task, **_label(a)} for a in result.alternatives[: options.top_k - 1]],
        "selected": result.routing.selected if result.routing else [],
        "truncated": result.truncated,
        "error": None,
        "explain": _explain(result, outcome.waited, options.top_k) if options.explain else None,
    }


def route_body(outcome: Outcome, top: int) -> dict[str, Any]:
    """One input's task."""
    result = outcome.result
    if isinstance(result, Fault):
        none = dict.fromkeys(("task", "confidence"))
        empty = {"alternatives": [], "selected": [], "truncated": False}
        return {**none, **empty, "error": {"code": result.code, "message": result.message}}
    routing = result.routing
    assert routing is not None
    ranked = sorted(routing.probabilities.items(), key=lambda pair: -pair[1])
    others = [{"task": task, "confidence": p} for task, p in ranked if task != result.task]
    return {
        "task": result.task,
        "confidence": result.confidence,
        "alternatives": others[: top - 1],
        "selected": routing.selected,
        "truncated": result.truncated,
        "error": None,
    }


def _explain(prediction: Prediction, waited: float, top: int) -> dict[str, Any]:
    routing = prediction.routing
    assert routing is not None
    timings = {name: value for name, value in prediction.timings.items() if name != "inputs"}
    return {
        "residuals": routing.residuals,
        "weights": routing.weights,
        "probabilities": routing.probabilities,
        "margin": routing.margin,
        "lift": routing.lift,
        "agreement": routing.agreement,
        "confidences": routing.confidences,
        "typicality": routing.typicality,
        "site": routing.site,
        "heads": {task: [_label(a) for a in answers] for task, answers in heads_of(prediction, top).items()},
        "timings": {"waiting": round(waited, 3), **timings},
        "batch_size": int(prediction.timings["inputs"]),
    }


def _head(answer: Prediction) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in ("label", "confidence", "score", "labels", "scores", "value")}


def _label(answer: Answer) -> dict[str, Any]:
    return {"label": answer.label, "score": answer.score, "value": answer.value}


def labels_body(outcome: Outcome, index: int, top: int) -> list[dict[str, Any]]:
    """One input's answer as a list of labels with scores, which is also how that schema gives a number.

    Raises:
        ServiceError: the input could not be answered; that schema has no place for it.
    """
    result = outcome.result
    if isinstance(result, Fault):
        status = 500 if result.code == "internal" else 422
        raise ServiceError(status, result.code, f"inputs[{index}]: {result.message}")
    if result.task is None:
        return []
    answers: list[Prediction | Answer] = [*([result] if result.label is not None else []), *result.alternatives]
    return [{"task": a.task, "label": a.label, "score": a.score if a.value is None else a.value} for a in answers[:top]]
