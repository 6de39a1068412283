"""The endpoints that answer inputs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from massmerge.serve.batching import BatchKey, Outcome
from massmerge.serve.bodies import EVERYTHING, choice_of, json_response, labels_body, prediction_body, status_of
from massmerge.serve.errors import ServiceError
from massmerge.serve.openapi import ERRORS, HUGGING_FACE_BODY, PREDICT_BODY
from massmerge.serve.reading import media_type, read_json, read_predict
from massmerge.serve.schemas import HuggingFaceLabel, HuggingFaceParameters, HuggingFaceRequest, PredictAnswer
from massmerge.serve.service import Service
from massmerge.serve.worker import Item, SentImage

_HF_TOP = 5  # what Hugging Face's services answer


def make_routes(service: Service) -> APIRouter:
    """`POST /v1/predict`, and `POST /` as Hugging Face's clients call it."""
    router = APIRouter()

    @router.post(
        "/v1/predict", response_model=PredictAnswer, responses=ERRORS, openapi_extra=PREDICT_BODY, tags=["answers"]
    )
    async def predict(request: Request) -> Response:
        """Answer one input or many, each with its task, label and score.

        An input that cannot be read has its error in its place, and the others are answered. Where none can be read the
        status is 422.
        """
        service.loaded.refuse_unless("labels")
        items, options = await read_predict(request, service.settings)
        state = request.state
        choice = choice_of(options, state.request_id, service.loaded.model.tasks)
        top = EVERYTHING if options.explain else options.top_k
        outcomes = await _answers(service, request, items, choice, top, options.session)
        body: dict[str, Any] = {
            "request_id": state.request_id,
            "model": service.settings.model_name,
            "predictions": [prediction_body(outcome, options) for outcome in outcomes],
        }
        status = status_of(outcomes)
        if status != 200:
            body["error"] = body["predictions"][0]["error"]
        return json_response(body, status)

    @router.post(
        "/", response_model=list[list[HuggingFaceLabel]] | list[HuggingFaceLabel], responses=ERRORS,
        openapi_extra=HUGGING_FACE_BODY, tags=["answers"],
    )  # fmt: skip
    async def hugging_face(request: Request) -> Response:
        """Text or image classification in Hugging Face's schema: labels with scores, best first.

        For text a list for each input; for an image its list, as `huggingface_hub.InferenceClient` reads them. Where no task
        fits an input its list is empty.
        """
        service.loaded.refuse_unless("labels")
        given, single = await _hugging_face_items(request, service)
        items, parameters = given
        loaded = service.loaded
        top = parameters.top_k or _HF_TOP
        choice = choice_of(parameters, request.state.request_id, loaded.model.tasks)
        outcomes = await _answers(service, request, items, choice, top)
        lists = [labels_body(outcome, index, top) for index, outcome in enumerate(outcomes)]
        return json_response(lists[0] if single and loaded.model.takes_images else lists)

    return router


async def _hugging_face_items(
    request: Request, service: Service
) -> tuple[tuple[list[Item], HuggingFaceParameters], bool]:
    """The inputs, and whether one was given by itself."""
    kind = media_type(request)
    if kind.startswith("image/") or kind in ("", "application/octet-stream"):  # their client names no type for bytes
        return ([SentImage(await request.body())], HuggingFaceParameters()), True
    if kind != "application/json":
        raise ServiceError(415, "unsupported_media_type", "Send application/json, or an image.")
    body = await read_json(request, HuggingFaceRequest)
    single = isinstance(body.inputs, str)
    items: list[Item] = [body.inputs] if isinstance(body.inputs, str) else list(body.inputs)
    if not 0 < len(items) <= service.settings.max_items:
        message = f"inputs: {len(items)}; 1 to {service.settings.max_items} are accepted."
        raise ServiceError(422 if not items else 413, "invalid" if not items else "too_many_inputs", message)
    return (items, body.parameters or HuggingFaceParameters()), single


async def _answers(
    service: Service, request: Request, items: list[Item], choice: BatchKey, top: int, session: str | None = None
) -> list[Outcome]:
    request.state.inputs = len(items)
    return await service.answer(request, items, choice, top, request.state.deadline, session)
