"""The lines of the log, as text or as JSON, in every process alike."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any

FORMATS = ("text", "json")

# Of the HTTP request that is worked on; empty elsewhere.
request_id: ContextVar[str] = ContextVar("request_id", default="")

# What a record says besides, as `extra={FIELDS: {...}}`.
FIELDS = "atom_fields"


class TextFormatter(logging.Formatter):
    """Args:
    process: its name; None where there is one process.
    """

    def __init__(self, process: str | None = None) -> None:
        name = "" if process is None else f"[{process.replace('%', '%%')}] "
        super().__init__(f"%(asctime)s %(levelname)s {name}%(name)s: %(message)s")
        self.process = process

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = {"request_id": request_id.get(), **getattr(record, FIELDS, {})}
        said = [f" {name}={value}" for name, value in fields.items() if value not in ("", None)]
        return super().formatMessage(record) + "".join(said)


class JsonFormatter(logging.Formatter):
    """One object a line: `timestamp` (UTC), `level`, `logger`, `message`, and where there are such
    `process`, `request_id`, `exception` and the record's own fields.
    """

    def __init__(self, process: str | None = None) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "timestamp": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self.process is not None:
            line["process"] = self.process
        if named := request_id.get():
            line["request_id"] = named
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({**line, **getattr(record, FIELDS, {})}, default=str)


_FORMATTERS = {"text": TextFormatter, "json": JsonFormatter}


def set_up(
    format: str = "text", *, process: str | None = None, level: int | str | None = None
) -> None:
    """Send the log of this process to standard error, unless it goes somewhere already."""
    handler = logging.StreamHandler()
    handler.setFormatter(_FORMATTERS[format](process))
    logging.basicConfig(handlers=[handler], level=level)


def use_format(format: str) -> None:
    """Change how the lines look that `set_up` sends."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, TextFormatter | JsonFormatter):
            handler.setFormatter(_FORMATTERS[format](handler.formatter.process))


def settings() -> tuple[int, str]:
    """The level of `atom`, and the format: what processes that this one starts are told."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    is_json = any(isinstance(formatter, JsonFormatter) for formatter in formatters)
    return logging.getLogger("atom").getEffectiveLevel(), "json" if is_json else "text"
