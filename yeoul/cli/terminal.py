"""The terminal: streams, progress and Ctrl-C. Owns how output reaches people and pipes; must not know what it says."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Progress = Callable[[int, int], None]
"""Called with (done, in all)."""

PLAIN_STEPS = 10
"""Lines of progress where there is no terminal."""


def prepare_streams() -> None:
    """Pipes carry UTF-8 whatever the locale; a terminal that cannot show a character shows a stand-in."""
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        if not sys.stdout.isatty():
            sys.stdout.reconfigure(encoding="utf-8")
        sys.stdout.reconfigure(errors="replace")


def write(text: str) -> None:
    """Show a piece of a reply at once. On a terminal, control characters cannot do anything but break lines."""
    sys.stdout.write(_harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _harmless(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: the first one is noted, the second one raises KeyboardInterrupt."""
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


@contextmanager
def interrupt_noted() -> Iterator[Interrupt]:
    """While inside, Ctrl-C does not raise in the middle of a step: whoever steps looks at `pressed` in between."""
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress(title: str, unit: str, scale: float = 1.0) -> Iterator[Progress]:
    """A bar on a terminal, a few plain lines elsewhere, on stderr. Amounts are shown divided by `scale`, in `unit`."""
    if not sys.stderr.isatty():
        yield _plain(title, unit, scale)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    counts = TextColumn("{task.fields[done]} of {task.fields[all]} " + unit)
    console = Console(stderr=True)
    with Bar(TextColumn("{task.description}"), BarColumn(), counts, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(title, total=None, done=0, all="?")

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, done=f"{done / scale:.0f}", all=f"{total / scale:.0f}")

        yield show


def _plain(title: str, unit: str, scale: float) -> Progress:
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        step = done * PLAIN_STEPS // max(total, 1)
        if step > shown:
            shown = step
            print(f"{title}: {done / scale:.0f} of {total / scale:.0f} {unit}", file=sys.stderr, flush=True)

    return show
