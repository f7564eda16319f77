"""Log lines: one per event, nothing unprintable."""

from __future__ import annotations

import io
import json
import logging
from datetime import datetime

import pytest

from yeoul.obs.logs import escape_controls, setup_logging


@pytest.fixture
def stream():
    """Logging set up to a buffer; the loggers are as before afterwards."""
    root, names = logging.getLogger(), ("yeoul", "uvicorn.error", "uvicorn.access")
    before = root.handlers[:], root.level, {name: logging.getLogger(name).level for name in names}
    buffer = io.StringIO()
    root.handlers[:] = []
    setup_logging("info", buffer)
    yield buffer
    root.handlers[:], root.level = before[0], before[1]
    for name, level in before[2].items():
        logging.getLogger(name).setLevel(level)


def test_one_line_per_event_with_controls_escaped(stream):
    logging.getLogger("yeoul.server").info("id %s", "a\r\nFAKE ERROR \x1b[31m\u2028é")
    (line,) = stream.getvalue().split("\n")[:-1]
    assert line.endswith("INFO yeoul.server: id a\\r\\nFAKE ERROR \\x1b[31m\\u2028é")


def test_tracebacks_stay_on_the_line(stream):
    try:
        raise ValueError("x\ny")
    except ValueError:
        logging.getLogger("yeoul").exception("failed")
    assert stream.getvalue().count("\n") == 1 and "ValueError: x\\ny" in stream.getvalue()


def test_levels(stream):
    logging.getLogger("yeoul.engine").debug("no")
    logging.getLogger("uvicorn.error").info("no")
    logging.getLogger("other").info("no")
    logging.getLogger("other").warning("yes")
    assert stream.getvalue().count("\n") == 1


def test_printable_text_is_unchanged():
    assert escape_controls("naïve 🙂 여울") == "naïve 🙂 여울"


def test_json_lines(stream):
    setup_logging("info", stream, form="json")
    log = logging.getLogger("yeoul.server")
    log.info("request %s\nfailed \x1b[31m %s", "é", "\ud800")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("it broke")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "request é\nfailed \x1b[31m \\ud800"
    assert (first["level"], first["logger"]) == ("info", "yeoul.server") and "traceback" not in first
    assert second["level"] == "error" and "ValueError: two\nlines" in second["traceback"]
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
