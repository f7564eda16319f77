"""Clock: the only place that reads time. Everything else is told what time it is. Must not know who asks."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time; a simulation brings its own."""

    def now(self) -> float:
        """Seconds since an arbitrary start, never going back: for differences."""
        ...

    def unix(self) -> float:
        """Seconds since 1970: for the calendar, in headers of logs."""
        ...


class WallClock:
    """The machine's clocks."""

    def now(self) -> float:
        """The system's monotonic clock."""
        return time.monotonic()

    def unix(self) -> float:
        """The system's idea of the date; it may jump."""
        return time.time()


class Stopwatch:
    """Durations of consecutive parts of a step, in seconds."""

    __slots__ = ("_clock", "_last", "laps", "started_at")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.started_at = self._last = clock.now()
        self.laps: list[float] = []

    def lap(self) -> float:
        """End a part: its duration is appended to `laps`. Returns the time now."""
        now = self._clock.now()
        self.laps.append(now - self._last)
        self._last = now
        return now
