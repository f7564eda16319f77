"""Logging: one line per event on stderr. Owns the line's form; must not know who logs. Callers log no prompts."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

import orjson

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


class OneLineFormatter(logging.Formatter):
    """`2026-01-31 12:00:00 INFO yeoul.server: text`; everything that could break a line or drive a terminal escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The record, tracebacks included, as one printable line."""
        return escape_controls(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps({name: _encodable(text) for name, text in line.items()}).decode()


def _encodable(text: str) -> str:
    """Half of a surrogate pair has no UTF-8 form."""
    return text.encode("utf-8", "backslashreplace").decode()


def escape_controls(text: str) -> str:
    """Every character that is not printable as an escape, e.g. a line feed as \\n."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def setup_logging(level: str = "info", stream: TextIO | None = None, *, form: str = "text") -> None:
    """Send all logs to `stream` (stderr), one line each, replacing earlier handlers. `form`: one of FORMATS.

    uvicorn's own messages count from `warning` on, except its access log, which has its own switch.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else OneLineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("yeoul").setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
