"""Which errors become which lines and exit codes; bugs keep their traceback."""

import errno
import os

import pytest
import typer

from yeoul.cli import app, failures, main
from yeoul.cli.failures import UsageError, report
from yeoul.errors import CapacityError, ConfigError, ModelFileError

CASES = [
    (ModelFileError("no such file", hint="look"), 1, "error: no such file\nhint: look\n"),
    (ConfigError("bad"), 1, "error: bad\n"),
    (UsageError("bad", hint="better"), 2, "error: bad\nhint: better\n"),
    (CapacityError("two\nlines\x1b[31m"), 1, "error: two\\nlines\\x1b[31m\n"),
    (KeyboardInterrupt(), 130, ""),
    (typer.Abort(), 130, ""),
    (typer.Exit(7), 7, ""),
    (typer.BadParameter("odd"), 2, "error: Invalid value: odd\nhint: yeoul --help\n"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "error: the output: No space left on device\n"),
    (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "error: /x: Permission denied\n"),
    (ImportError("cannot import name '_native'"), 1, "error: the native core is not built\nhint: run `make build`\n"),
    (UnicodeDecodeError("utf-8", b"a\xff", 1, 2, ""), 1, "error: the input is not valid UTF-8\nhint: byte 1 is 0xff\n"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "code", "said"), CASES, ids=lambda value: type(value).__name__)
def test_errors_of_users(error, code, said, capsys):
    assert report(error) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", said)


def test_too_little_memory_names_who_says_what_fits(capsys):
    assert report(MemoryError()) == 1
    assert capsys.readouterr().err.splitlines()[1].startswith("hint: `yeoul plan MODEL --memory SIZE`")


@pytest.mark.parametrize("error", [ZeroDivisionError(), ImportError("numpy"), SystemExit(3)])
def test_bugs_are_not_hidden(error, capsys, monkeypatch):
    assert report(error) is None
    assert capsys.readouterr().err == ""

    def fail(args):
        raise error

    monkeypatch.setattr(app, "run", fail)
    with pytest.raises(type(error)):
        main([])


def test_a_broken_pipe_is_quiet(capfd, monkeypatch):
    before = os.dup(1)
    try:
        assert report(BrokenPipeError()) == failures.BROKEN_PIPE
        os.write(1, b"goes nowhere")
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert capfd.readouterr() == ("", "")
