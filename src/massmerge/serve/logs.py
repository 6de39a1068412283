"""Logs for machines and people: one line an event, with the request's id and never an input."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Literal, TextIO

FIELDS = (
    "request_id",
    "method",
    "path",
    "status",
    "ms",
    "inputs",
    "code",
    "client",
    "fault",
    "url",
    "bundle",
    "seconds",
)


class _TextFormatter(logging.Formatter):
    """`time level message key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        pairs = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        return f"{_time(record)} {record.levelname.lower():7} {record.getMessage()} {pairs}".rstrip()


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        head = {"time": _time(record), "level": record.levelname.lower(), "event": record.getMessage()}
        return json.dumps({**head, **_fields(record)}, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = {name: getattr(record, name) for name in FIELDS if getattr(record, name, None) is not None}
    if record.exc_info and record.exc_info[1]:
        found["fault"] = without_values(record.exc_info[1])
    return found


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def without_values(error: BaseException) -> str:
    """An error as its kind and the lines that it came through; its message could quote an input."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    where = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {where}" if where else type(error).__name__


def set_up_logs(form: Literal["text", "json"], level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send the service's log, and what its server complains of, to standard error in one form."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    for name, least in (
        ("massmerge.serve", level),
        ("uvicorn.error", logging.WARNING if level <= logging.DEBUG else logging.ERROR),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)
