"""Admission: in what order waiting sequences may start, and with what each one starts.

Owns the batching gate, the order and the choice among forking, the prefix cache and computing. Must not change
sequences, slots or pools: it answers, the scheduler acts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from yeoul.kv.manager import KVManager
from yeoul.kv.tables import Prefix
from yeoul.sched.draft import PlanDraft
from yeoul.sched.policies import Policies, in_order
from yeoul.sched.sequence import Sequence, SequenceStatus


class Admission:
    """Asked once per step. Keeps whether a static batch still takes sequences in."""

    def __init__(self, kv: KVManager, policies: Policies) -> None:
        self._kv = kv
        self._policies = policies
        self._batch_is_open = True

    def gate(self, draft: PlanDraft, num_free_slots: int, num_running: int, has_preempted: bool) -> str | None:
        """Why nobody at all may start in this step; None if somebody may."""
        self._batch_is_open |= num_running == 0
        if has_preempted:
            return "preemption"
        if self._policies.batching == "static" and not self._batch_is_open:
            return "batch"
        if not num_free_slots:
            return "slots"
        return None if draft.budget > 0 else "tokens"

    def end_of_step(self, wait_reason: str | None) -> None:
        """A static batch is complete when the queue is empty, or when slots or blocks are; a spent budget is no end."""
        self._batch_is_open = wait_reason in ("tokens", "fork")

    def candidates(self, waiting: Iterable[Sequence], now: float) -> Iterator[Sequence]:
        """The queue in the policy's order, without those that will fork from a sequence that is not ready for it."""
        ordered = in_order(waiting, self._policies, now, self._num_cached)
        return (sequence for sequence in ordered if not self._waits_for_fork(sequence))

    def _num_cached(self, sequence: Sequence) -> int:
        if sequence.reads_prompt:
            return 0
        return self._kv.match(sequence.tables, sequence.num_tokens).num_tokens

    def _waits_for_fork(self, sequence: Sequence) -> bool:
        """The first of n sequences computes the prompt; the others come when it has. A resumed one waits for nobody."""
        if not self._policies.fork or sequence.index == 0 or sequence.first_scheduled_at is not None:
            return False
        if sequence.reads_prompt:
            return False
        first = sequence.siblings[0]
        done = first.status is SequenceStatus.FINISHED or first.num_computed_tokens >= sequence.num_prompt_tokens
        return not done and sequence.num_prompt_tokens > 1

    def prefix(self, sequence: Sequence, started: Collection[Sequence]) -> tuple[Prefix, Sequence | None]:
        """What a stay begins with: what was swapped out, or the longer of a sibling's prompt and what is cached.

        Also the sibling, if it is that. Nothing, where something is wanted of the prompt's own positions.

        `started`: sequences whose own stay begins in this step; their blocks may not hold anything yet.
        """
        if sequence.swapped is not None:
            return Prefix(sequence.swapped.num_tokens, self._kv.nothing), None
        if sequence.reads_prompt:
            return Prefix(0, self._kv.nothing), None
        cached = self._kv.match(sequence.tables, sequence.num_tokens)
        length = sequence.num_prompt_tokens - 1
        if not self._policies.fork or len(sequence.siblings) == 1 or length <= cached.num_tokens:
            return cached, None
        for other in sequence.siblings:
            ready = other.status is SequenceStatus.RUNNING and other.num_computed_tokens >= length
            if ready and other not in started:
                forked = self._kv.fork(other.tables, length)
                if forked is not None:
                    return forked, other
        return cached, None

    def takes(self, draft: PlanDraft, num_tokens: int) -> bool:
        """Whether `num_tokens` that are to be computed may begin in this step; `prefill_first` wants them whole."""
        return self._policies.batching != "prefill_first" or not draft.rows or num_tokens <= draft.budget
