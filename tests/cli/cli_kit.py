"""Runs of the real command: in a process of its own, or (quicker) in this one."""

import io
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from yeoul.cli import main

YEOUL = [sys.executable, "-c", "import sys; from yeoul.cli import main; sys.exit(main())"]
LONG = ["--max-tokens", "900", "--ignore-eos"]


def yeoul(*args: object, stdin: str | bytes = b"", **env: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; stdout and stderr as text."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([*YEOUL, *map(str, args)], input=data, capture_output=True, env=os.environ | env, timeout=60)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def inline(*args: object, stdin: str | bytes = b"", **env: str) -> subprocess.CompletedProcess[str]:
    """As `yeoul`, without a process: what is imported stays imported."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = io.TextIOWrapper(io.BytesIO(), newline=""), io.TextIOWrapper(io.BytesIO(), newline="")
    with redirect_stdout(out), redirect_stderr(err), mock.patch.dict(os.environ, env), _logging_as_before():
        with mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(data))):
            code = main(list(map(str, args)))
        out.flush()
        err.flush()
    return subprocess.CompletedProcess(
        [str(arg) for arg in args], code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()
    )


@contextmanager
def _logging_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", "yeoul", "uvicorn.error", "uvicorn.access")]
    before = [(logger.handlers[:], logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    try:
        yield
    finally:
        for logger, (handlers, level) in zip(loggers, before, strict=True):
            logger.handlers = handlers
            logger.setLevel(level)


def start(*args: object, **options: object) -> subprocess.Popen[str]:
    """Run on; SIGINT works even where the tests themselves ignore it."""
    command = [*YEOUL, *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **{"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe} | options,
    )


@contextmanager
def running(*args: object, **options: object) -> Iterator[subprocess.Popen[str]]:
    """`start`, killed at the end whatever happens."""
    process = start(*args, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refuses(done: subprocess.CompletedProcess[str], code: int, *words: str, hint: str | None = None) -> None:
    """Nothing on stdout; on stderr one line of error, at most one of hint, no traceback."""
    assert (done.returncode, done.stdout) == (code, ""), done
    lines = done.stderr.splitlines()
    assert 1 <= len(lines) <= 2 and lines[0].startswith("error: "), done.stderr
    assert all(line.startswith("hint: ") for line in lines[1:]), done.stderr
    for word in words:
        assert word in lines[0], done.stderr
    if hint is not None:
        assert hint in lines[1], done.stderr


def cut(path: Path, target: Path, size: int) -> Path:
    target.write_bytes(path.read_bytes()[:size])
    return target
