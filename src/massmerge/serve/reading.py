"""From the body of a request to items and options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from massmerge.serve.errors import ServiceError
from massmerge.serve.schemas import ImageInput, Input, Message, Options, PredictRequest, RouteRequest, TextInput
from massmerge.serve.settings import ServiceSettings
from massmerge.serve.worker import Item, SentChat, SentImage, SentText

_M = TypeVar("_M", bound=BaseModel)
_INPUTS = 'give a text, {"text": …}, {"image": …}, or a list of these'
_MESSAGES = {"extra_forbidden": "unknown key", "missing": "is missing"}
_FORM_FIELD = 10_000  # bytes of an option in a form


def media_type(request: Request) -> str:
    """The kind of body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_json(request: Request, model: type[_M]) -> _M:
    """The body as what it should be.

    Raises:
        ServiceError: it is no JSON, or not of that form.
    """
    body = await request.body()
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ServiceError(415, "unsupported_media_type", "Content-Encoding is not supported; send the body as it is.")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise explained(error) from None


def explained(error: ValidationError) -> ServiceError:
    """All that is wrong with a body, once each, without quoting it."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    if faults[0]["type"] == "json_invalid":
        return ServiceError(
            400, "bad_json", f"The body is not valid JSON: {faults[0]['msg'].removeprefix('Invalid JSON: ')}."
        )
    said = {}
    for fault in faults:
        name = ".".join(str(part) for part in fault["loc"][:1]) or "body"
        said[name] = (
            _INPUTS if name == "inputs" and fault["type"] != "missing" else _MESSAGES.get(fault["type"], fault["msg"])
        )
    return ServiceError(422, "invalid", "; ".join(f"{name}: {message}" for name, message in said.items()) + ".")


async def read_predict(request: Request, settings: ServiceSettings) -> tuple[list[Item], Options]:
    """Inputs and options of `/v1/predict`: JSON, an upload, or an image as it is.

    Raises:
        ServiceError: the body is of another kind, or not of that form.
    """
    kind = media_type(request)
    if kind == "application/json":
        given = await read_json(request, PredictRequest)
        inputs = given.inputs if isinstance(given.inputs, list) else [given.inputs]
        return _counted([item_of(one) for one in inputs], settings), given
    if kind == "multipart/form-data":
        return await _read_form(request, settings)
    if kind.startswith("image/"):
        return [SentImage(await request.body())], Options()
    raise ServiceError(
        415, "unsupported_media_type", "Send application/json, multipart/form-data with images, or an image."
    )


async def read_route(request: Request, settings: ServiceSettings) -> tuple[list[Item], RouteRequest]:
    """Inputs and options of `/v1/route`.

    Raises:
        ServiceError: the body is of another kind, or not of that form.
    """
    if media_type(request) != "application/json":
        raise ServiceError(415, "unsupported_media_type", "Send application/json.")
    given = await read_json(request, RouteRequest)
    if (given.inputs is None) == (given.messages is None):
        raise ServiceError(422, "invalid", "Give inputs or messages, one of them.")
    if given.messages is not None:
        return [chat_of(given.messages)], given
    inputs = given.inputs if isinstance(given.inputs, list) else [given.inputs]
    return _counted([item_of(one) for one in inputs if one is not None], settings), given


def chat_of(messages: Sequence[Message]) -> SentChat:
    """A conversation as the worker takes it; what has no text is left out."""
    return SentChat(tuple((message.role, message.words) for message in messages if message.words))


def item_of(given: Input) -> Item:
    """An input of the schema as the worker takes it; a bare string is what the model takes."""
    if isinstance(given, ImageInput):
        return SentImage(given.image)
    if isinstance(given, TextInput):
        return SentText(given.text, given.text_pair)
    return given


def _counted(items: list[Item], settings: ServiceSettings) -> list[Item]:
    if not items:
        raise ServiceError(422, "invalid", "inputs: the list is empty.")
    if len(items) > settings.max_items:
        message = f"{len(items)} inputs in one request; the limit is {settings.max_items}. Split them."
        raise ServiceError(413, "too_many_inputs", message)
    return items


async def _read_form(request: Request, settings: ServiceSettings) -> tuple[list[Item], Options]:
    """Images as uploaded files, whatever their fields are called, and options as fields."""
    try:
        form = await request.form(max_files=settings.max_items, max_fields=64, max_part_size=_FORM_FIELD)
    except HTTPException as error:
        raise ServiceError(400, "bad_form", f"The form cannot be read: {error.detail}") from None
    try:
        items: list[Item] = []
        options: dict[str, Any] = {}
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                items.append(SentImage(await value.read()))
            elif name == "tasks":
                options.setdefault("tasks", []).append(value)
            else:
                options[name] = value
        return _counted(items, settings), Options.model_validate(options)
    except ValidationError as error:
        raise explained(error) from None
    finally:
        await form.close()
