"""Scheduling policies: small functions that answer one question each. Must not change anything they look at."""

from __future__ import annotations

from collections import deque

from yeoul.sched.sequence import Sequence


def first_come_first_served(waiting: deque[Sequence]) -> Sequence:
    """Order: who is admitted next. A preempted sequence stands at the front again, so arrival order is kept."""
    return waiting[0]


def latest_arrived(running: list[Sequence]) -> Sequence:
    """Victim: who is preempted when blocks run out. `running` is in arrival order."""
    return running[-1]
