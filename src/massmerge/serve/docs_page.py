"""`/docs`: the OpenAPI description as a page to read, made here; the usual viewers load scripts from other machines."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse

_METHODS = ("get", "post")


def add_docs(app: FastAPI) -> None:
    """Add the page to an application."""

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        """The page."""
        return HTMLResponse(render(app.openapi(), str(request.base_url).rstrip("/")))


def render(description: dict[str, Any], url: str) -> str:
    """The page of a description; `url` is where its examples call."""
    info = description["info"]
    operations = [
        (method, path, item[method])
        for path, item in description["paths"].items()
        for method in _METHODS
        if method in item
    ]
    index = "".join(
        f'<li><a href="#{_anchor(m, p)}">{m.upper()} {escape(p)}</a> {escape(_title(o))}</li>' for m, p, o in operations
    )
    key = "<p>Requests carry a key: <code>Authorization: Bearer …</code>.</p>" if description.get("security") else ""
    parts = "".join(_operation(m, p, o, url) for m, p, o in operations)
    schemas = "".join(_schema(name, schema) for name, schema in sorted(description["components"]["schemas"].items()))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>API of mass serve</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="icon.svg" type="image/svg+xml">'
        '<link rel="stylesheet" href="style.css"><link rel="stylesheet" href="docs.css">'
        f"</head><body><header><h1>API</h1><p>{escape(info['summary'])}</p>{key}"
        '<p><a href="./">The page</a> · <a href="openapi.json">OpenAPI as JSON</a></p></header>'
        f"<main><ul>{index}</ul>{parts}<h2>What goes over the wire</h2>{schemas}</main></body></html>"
    )


def _anchor(method: str, path: str) -> str:
    return f"{method}{path.replace('/', '-')}"


def _title(operation: dict[str, Any]) -> str:
    return str(operation.get("description", "")).split("\n\n")[0]


def _operation(method: str, path: str, operation: dict[str, Any], url: str) -> str:
    text = "".join(f"<p>{escape(part)}</p>" for part in operation.get("description", "").split("\n\n"))
    body = operation.get("requestBody", {}).get("content", {})
    takes = f"<p>Takes {', '.join(f'<code>{escape(kind)}</code>' for kind in body)}.</p>" if body else ""
    examples = [example["value"] for example in body.get("application/json", {}).get("examples", {}).values()]
    calls = [_curl(method, path, url, example) for example in examples or [None]]
    rows = "".join(
        f"<tr><td>{status}</td><td>{escape(answer['description'])}</td><td>{_link(answer)}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    return (
        f'<section id="{_anchor(method, path)}"><h2>{method.upper()} {escape(path)}</h2>{text}{takes}'
        f"{''.join(f'<pre><code>{escape(call)}</code></pre>' for call in calls)}"
        f"<table><thead><tr><th>Status</th><th>Means</th><th>Body</th></tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _curl(method: str, path: str, url: str, example: Any) -> str:
    if example is None:
        return f"curl {'-X POST ' if method == 'post' else ''}{url}{path}"
    data = json.dumps(example, ensure_ascii=False).replace("'", r"'\''")
    return f"curl {url}{path} -H 'Content-Type: application/json' \\\n  -d '{data}'"


def _link(answer: dict[str, Any]) -> str:
    """The name of what an answer holds, as a link to it."""
    kinds: dict[str, dict[str, Any]] = answer.get("content", {})
    return " or ".join(_type(kind["schema"]) for kind in kinds.values() if kind.get("schema"))


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code></td><td>{_type(part)}{'' if field in required else ', optional'}</td>"
        f"<td>{escape(part.get('description', ''))}</td></tr>"
        for field, part in schema.get("properties", {}).items()
    )
    title = f'<section id="{escape(name)}"><h3>{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p>'
    return f"{title}<table><tbody>{rows}</tbody></table></section>"


def _type(schema: dict[str, Any]) -> str:
    """What a value may be, in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "anything")))
