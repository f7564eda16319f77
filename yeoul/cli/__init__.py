"""The command line. Owns the entry point; commands are one file each: parse, call one function, print.

Must not compute anything itself. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Run one command (`args`: the process's own by default) and return its exit code.

    0 done, 2 wrong usage, 130 interrupted, 141 nobody reads stdout any more, 1 any other failure. Failures that a user
    can cause are one line on stderr and, where there is one, a hint; only a bug in Yeoul leaves an exception.
    """
    try:
        from yeoul.cli.app import run

        return run(args)
    except BaseException as error:
        from yeoul.cli.failures import report

        code = report(error)
        if code is None:
            raise
        return code
