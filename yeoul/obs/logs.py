"""Logging: one line per event on stderr. Owns the line's form; must not know who logs. Callers log no prompts."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")


class OneLineFormatter(logging.Formatter):
    """`2026-01-31 12:00:00 INFO yeoul.server: text`; everything that could break a line or drive a terminal escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The record, tracebacks included, as one printable line."""
        return escape_controls(super().format(record))


def escape_controls(text: str) -> str:
    """Every character that is not printable as an escape, e.g. a line feed as \\n."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def setup_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Send all logs to `stream` (stderr), one line each, replacing earlier handlers.

    uvicorn's own messages count from `warning` on, except its access log, which has its own switch.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(OneLineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("yeoul").setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
