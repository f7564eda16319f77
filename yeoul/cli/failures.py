"""What a failed command says and which exit code it has. Owns the words on stderr; must not know any command."""

from __future__ import annotations

import errno
import os
import sys

from typer import Abort, Exit, TyperException

from yeoul.errors import ConfigError, YeoulError

USAGE = 2
FAILED = 1
INTERRUPTED = 130
"""As a shell reports a process that ended by SIGINT."""
BROKEN_PIPE = 141
"""As a shell reports a process that ended by SIGPIPE."""


class UsageError(ConfigError):
    """An option on the command line is wrong: exit code 2."""


def report(error: BaseException) -> int | None:
    """Tell the user about an error in one line and a hint; returns the exit code.

    None: not an error that a user can cause. Nothing was printed.
    """
    if isinstance(error, BrokenPipeError):
        _discard_stdout()
        return BROKEN_PIPE
    if isinstance(error, (KeyboardInterrupt, Abort)):
        return INTERRUPTED
    if isinstance(error, Exit):
        return error.exit_code
    described = _describe(error)
    if described is None:
        return None
    message, hint, code = described
    say_error(message, hint)
    return code


def say_error(message: str, hint: str | None) -> None:
    """`error: ...` and `hint: ...` on stderr, one line each whatever is in them."""
    from yeoul.obs.logs import escape_controls

    print(f"error: {escape_controls(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {escape_controls(hint)}", file=sys.stderr)


def _describe(error: BaseException) -> tuple[str, str | None, int] | None:
    """(message, hint, exit code)."""
    if isinstance(error, YeoulError):
        return str(error), error.hint, USAGE if isinstance(error, UsageError) else FAILED
    if isinstance(error, TyperException):
        return error.format_message(), _help_hint(error), error.exit_code
    if isinstance(error, UnicodeDecodeError):
        return "the input is not valid UTF-8", f"byte {error.start} is {error.object[error.start]:#04x}", FAILED
    if isinstance(error, MemoryError):
        return "not enough memory", "`yeoul plan MODEL --memory SIZE` says what fits in SIZE", FAILED
    if isinstance(error, OSError):
        return _describe_os_error(error)
    if isinstance(error, ImportError) and "_native" in str(error):
        return "the native core is not built", "run `make build`", FAILED
    return None


def _describe_os_error(error: OSError) -> tuple[str, str | None, int]:
    where = error.filename or ("the output" if error.errno == errno.ENOSPC else None)
    message = error.strerror or str(error)
    return f"{where}: {message}" if where else message, None, FAILED


def _help_hint(error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context is not None else 'yeoul'} --help"


def _discard_stdout() -> None:
    """Else Python complains when it flushes stdout at the end."""
    handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, sys.stdout.fileno())
    os.close(handle)
