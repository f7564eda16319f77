"""Timeline: where the time of one sequence went, from its arrival to its last token.

Owns the accounting; the engine tells it what happened and when. Must not know clocks, text or clients. Every moment
between two events is put into exactly one part (or split over two), so the parts sum to the whole by construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from yeoul.sched.scheduler import Scheduler
from yeoul.step import StepPlan
from yeoul.types import SequenceTimes


class Timeline:
    """Times in seconds of the engine's clock."""

    __slots__ = (
        "_decode",
        "_first_token_at",
        "_high_water",
        "_last",
        "_preempted",
        "_prefill",
        "_queue",
        "_stalled",
        "_started",
        "_waits",
    )  # fmt: skip

    def __init__(self, arrived_at: float) -> None:
        self._last = arrived_at
        self._waits = True
        self._started = False
        self._high_water = 0
        self._first_token_at: float | None = None
        self._decode = 0.0
        self._queue = self._prefill = self._stalled = self._preempted = 0.0

    def planned(self, now: float) -> None:
        """A step will compute a part of the sequence: if it waited, that is over."""
        if not self._waits:
            return
        if self._started:
            self._preempted += now - self._last
        else:
            self._queue += now - self._last
        self._last, self._waits, self._started = now, False, True

    def preempt(self, now: float, num_lost_tokens: int) -> None:
        """It went back to the queue; until it has those tokens again, its time is lost to preemption."""
        self._preempted += now - self._last
        self._last, self._waits = now, True
        self._high_water = max(self._high_water, num_lost_tokens)

    def computed(self, now: float, end: int, *, has_output: bool, samples: bool, others: float) -> None:
        """A step computed the positions before `end`. `others`: the share of it that went into others' prompts."""
        spent = now - self._last
        self._last = now
        stalled = spent * others
        self._stalled += stalled
        if end <= self._high_water:
            self._preempted += spent - stalled
        elif has_output:
            self._decode += spent - stalled
        else:
            self._prefill += spent - stalled
        if samples and self._first_token_at is None:
            self._first_token_at = now

    def times(self, num_output_tokens: int) -> SequenceTimes:
        """The parts so far."""
        first = self._first_token_at
        speed = None
        if first is not None and num_output_tokens > 1 and self._last > first:
            speed = (num_output_tokens - 1) / (self._last - first)
        return SequenceTimes(
            queue=self._queue,
            prefill=self._prefill,
            decode=self._decode,
            stalled=self._stalled,
            preempted=self._preempted,
            tokens_per_second=speed,
        )


class HasTimeline(Protocol):
    """What the engine keeps for each open sequence."""

    @property
    def timeline(self) -> Timeline:
        """The sequence's own."""
        ...


def follow_plan(outputs: Mapping[int, HasTimeline], scheduler: Scheduler, now: float) -> None:
    """Tell the timelines what the plan made at `now` means for their sequences."""
    for lost in scheduler.preempted:
        outputs[lost.sequence.id].timeline.preempt(now, lost.num_lost_tokens)
    for sequence in scheduler.scheduled:
        outputs[sequence.id].timeline.planned(now)


def follow_step(outputs: Mapping[int, HasTimeline], scheduler: Scheduler, plan: StepPlan, now: float) -> None:
    """Tell the timelines that the plan was executed until `now`. To be called before it is committed.

    A sequence that ended in flight, because its grammar failed, has no timeline any more.

    A step is as long as its tokens are many, once there is a prompt in it; so what it spends on other requests'
    prompts is their share of its tokens. One token of each of many sequences costs hardly more than one.
    """
    rows = list(zip(scheduler.scheduled, plan.rows, strict=True))
    num_prompt = sum(row.num_tokens for _, row in rows if row.num_tokens > 1)
    for sequence, row in rows:
        if sequence.id not in outputs:
            continue
        own = row.num_tokens if row.num_tokens > 1 else 0
        outputs[sequence.id].timeline.computed(
            now,
            row.start + row.num_tokens,
            has_output=sequence.num_output_tokens > 0,
            samples=row.sample,
            others=(num_prompt - own) / plan.num_tokens,
        )
