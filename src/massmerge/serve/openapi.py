"""What the OpenAPI description says of bodies and errors; bodies are read by hand, so they are described by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from massmerge.serve.openai.schemas import ChatRequest, CompletionRequest
from massmerge.serve.schemas import ErrorAnswer, HuggingFaceRequest, Options, PredictRequest, RouteRequest

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (
    PredictRequest, HuggingFaceRequest, Options, RouteRequest, ChatRequest, CompletionRequest,
)  # fmt: skip
_BINARY = {"schema": {"type": "string", "format": "binary"}}

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "The body does not match its type."},
    401: {"model": ErrorAnswer, "description": "The key is missing or wrong."},
    408: {"model": ErrorAnswer, "description": "The body did not arrive in time."},
    413: {"model": ErrorAnswer, "description": "The body is too large, or holds too many inputs."},
    415: {"model": ErrorAnswer, "description": "Bodies of this type are not supported."},
    422: {"model": ErrorAnswer, "description": "The body does not match the schema, or no input can be read."},
    503: {
        "model": ErrorAnswer,
        "description": "The service is busy or not ready; try again after `Retry-After` seconds.",
        "headers": {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}},
    },
}


def _json_body(model: type[BaseModel]) -> dict[str, Any]:
    examples = {f"example {i}": {"value": value} for i, value in enumerate(_examples(model), 1)}
    return {"schema": {"$ref": _REF.format(model=model.__name__)}, "examples": examples}


def _examples(model: type[BaseModel]) -> list[Any]:
    extra = model.model_config.get("json_schema_extra")
    found = extra.get("examples") if isinstance(extra, dict) else None
    return found if isinstance(found, list) else []


PREDICT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": _json_body(PredictRequest),
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "description": "Images as files, whatever their fields are called; options as fields.",
                    "properties": {
                        "image": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        **{name: {"$ref": _REF.format(model="Options") + f"/properties/{name}"}
                           for name in Options.model_fields},
                    },
                }
            },
            "image/*": _BINARY,
        },
    }
}  # fmt: skip
HUGGING_FACE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": _json_body(HuggingFaceRequest), "image/*": _BINARY},
    }
}


def _only_json(model: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": _json_body(model)}}}


ROUTE_BODY = _only_json(RouteRequest)
CHAT_BODY = _only_json(ChatRequest)
COMPLETION_BODY = _only_json(CompletionRequest)


def complete_openapi(app: FastAPI, *, locked: bool) -> None:
    """Add the forms of the bodies, and the key where one is asked for, to what FastAPI finds by itself."""
    found = app.openapi

    def openapi() -> dict[str, Any]:
        """The description, completed once."""
        if app.openapi_schema is None:
            description = found()
            schemas = description["components"]["schemas"]
            for model in _BODIES:
                schema = model.model_json_schema(ref_template=_REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
            if locked:
                description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                description["security"] = [{"key": []}]
            app.openapi_schema = description
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
