"""Scheduling policies: small functions that answer one question each. Must not change anything they look at.

Ageing: whoever has been in the engine for `ageing_seconds` comes before all who have not, in order of arrival, both
when somebody is admitted and when a victim is chosen. So no order and no stream of better requests starves anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import msgspec

from yeoul.sched.sequence import Sequence

LOOKAHEAD = 64
"""`longest_prefix` looks at this many of the longest waiting; to look at all would cost more than it finds."""

Rank = tuple[int, int, int]


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    """What EngineConfig says of scheduling; see there. `order` is its `scheduling_policy`."""

    batching: str = "continuous"
    order: str = "fcfs"
    victim: str = "latest"
    fork: bool = True
    ageing_seconds: float = 60.0


def in_order(
    waiting: Iterable[Sequence], policies: Policies, now: float, num_cached: Callable[[Sequence], int]
) -> list[Sequence]:
    """Who is admitted next, first to last. `waiting` is in order of arrival; `num_cached` looks into the cache."""
    if policies.order == "fcfs":
        return list(waiting)
    if policies.order == "longest_prefix":
        waiting = islice(waiting, LOOKAHEAD)

    def score(sequence: Sequence) -> int:
        if policies.order == "priority":
            return sequence.request.priority
        if policies.order == "shortest_prompt":
            return sequence.num_prompt_tokens
        return -num_cached(sequence)

    return sorted(waiting, key=lambda sequence: _rank(sequence, score, policies, now))


def choose_victim(running: Iterable[Sequence], policies: Policies, now: float) -> Sequence:
    """Who is preempted when blocks run out: of the ranks the last. The first one is never preempted, so work ends."""
    if policies.victim == "latest":
        return max(running, key=lambda sequence: sequence.id)
    return max(running, key=lambda sequence: _rank(sequence, lambda one: one.request.priority, policies, now))


def _rank(sequence: Sequence, score: Callable[[Sequence], int], policies: Policies, now: float) -> Rank:
    if now - sequence.arrived_at >= policies.ageing_seconds:
        return (0, 0, sequence.id)
    return (1, score(sequence), sequence.id)
