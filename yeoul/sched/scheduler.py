"""Scheduler: decides what the next step computes and applies what came of it.

Owns the queue, the running list, the slots and every change of a Sequence. Must not know time (it is told), tensors,
text or who asked. One token budget per step: running rows first, chunks of waiting prompts fill the rest.

Arrival order is an invariant, not a sort: admission takes the queue's head, preemption returns the latest arrived to
the queue's head, so every running sequence arrived before every waiting one and `running` is in arrival order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from yeoul.errors import ConfigError, ContextLengthError, EngineError
from yeoul.kv.manager import KVManager
from yeoul.sched.policies import first_come_first_served, latest_arrived
from yeoul.sched.sequence import NO_SLOT, Sequence, SequenceStatus
from yeoul.step import PlanRow, RowResult, RowStatus, StepPlan, StepResult
from yeoul.types import FinishReason, TokenLogprob

NewBlocks = tuple[tuple[int, ...], ...]
"""Per KV group, what a sequence's block table grew by."""

ROW_ERRORS = {
    RowStatus.NAN: "the model's output for this sequence is not a number",
    RowStatus.ERROR: "computing this sequence failed",
    RowStatus.NOTHING_ALLOWED: "the request's bans leave no token to generate",
}


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence gained in a step: tokens, an end, or both."""

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """All of them, when the prompt is complete."""
    pooled: bytes = b""
    ended_by_token: bool = False
    """The last token is an end token: it counts, its text is not shown."""
    finish_reason: FinishReason | None = None
    error: str | None = None


class Preempted(msgspec.Struct, frozen=True):
    """A sequence that went back to the queue, and how many computed tokens that cost."""

    sequence: Sequence
    num_lost_tokens: int


class SchedulerCounters(msgspec.Struct):
    """Only grow."""

    prompt_tokens: int = 0
    """Computed for the first time, of the first of a request's n sequences: the sum of the prompts' lengths."""
    generation_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation. One step may be in flight."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        end_tokens: frozenset[int] = frozenset(),
        room_for: Callable[[int], str | None] | None = None,
    ) -> None:
        """`room_for`: the flags that make room for sequences of so many tokens; None where no flag does.

        Raises ConfigError for a pool that cannot hold the window of a single sequence.
        """
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = kv.max_tokens(max_model_len)
        self.counters = SchedulerCounters()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_waiting_tokens = 0
        self.preempted: list[Preempted] = []
        """By the last `schedule` call, as are the next two."""
        self.scheduled: list[Sequence] = []
        """In the order of the plan's rows."""
        self.first_scheduled: list[Sequence] = []
        self.wait_reason: str | None = None
        """Why the queue's head was not admitted by the last `schedule` call: slots, tokens, blocks or preemption."""
        self._kv = kv
        self._end_tokens = end_tokens
        self._room_for = room_for
        self._max_chunk = kv.max_chunk(max_num_batched_tokens, self.max_model_len)
        if self._max_chunk < 1:
            raise ConfigError(
                "the KV pool of a window group is smaller than its window",
                hint=f"give it room for {1 - self._max_chunk} more tokens",
                param="kv_cache_memory",
            )
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._released_slots: list[int] = []
        self._step_id = 0
        self._is_in_flight = False
        self._leaving: list[Sequence] = []
        """Finished while in flight: their blocks and slots stay theirs until commit."""

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not finished, or holds blocks until a step in flight is committed."""
        return bool(self.waiting or self.running or self._leaving)

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raises ContextLengthError for a prompt that leaves no room for one token of output, even alone."""
        if num_prompt_tokens + 1 > self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens; at most {self.max_model_len} fit, "
                "prompt and at least one token of output together",
                hint=self._how_to_fit(num_prompt_tokens + 1),
                param="prompt",
            )

    def _how_to_fit(self, num_tokens: int) -> str:
        flags = self._room_for(num_tokens) if self._room_for is not None else None
        shorter = f"shorten the prompt by {num_tokens - self.max_model_len} tokens"
        return f"{shorter}, or start the engine with {flags}" if flags else shorter

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Clamps its max_tokens to the context. Raises what `check_fits` raises."""
        self.check_fits(sequence.num_prompt_tokens)
        room = self.max_model_len - sequence.num_prompt_tokens
        sequence.max_tokens = min(room, sequence.max_tokens)
        sequence.tables = self._kv.open()
        self.waiting.append(sequence)
        self.num_waiting_tokens += sequence.num_tokens

    def abort(self, sequence: Sequence) -> bool:
        """Finish with ABORT. False if it had finished already."""
        return self.finish(sequence, FinishReason.ABORT)

    def finish(self, sequence: Sequence, reason: FinishReason) -> bool:
        """End a sequence in any state, once: False if it had finished already.

        Its blocks and slot are free at once, or at commit (or fail_step) if it is in flight.
        """
        if sequence.status is SequenceStatus.FINISHED:
            return False
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
            self.num_waiting_tokens -= sequence.num_tokens
        else:
            self.running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        if sequence.num_scheduled_tokens:
            self._leaving.append(sequence)
        else:
            self._vacate(sequence)
        return True

    def schedule(self, now: float) -> StepPlan:
        """Plan one step; its rows are in flight until `commit` or `fail_step`. No rows if there is no work.

        Raises EngineError if a step is in flight, or if a sequence does not fit even alone (which `add` excludes).
        """
        if self._is_in_flight:
            raise EngineError("a step is in flight already")
        self.preempted, self.scheduled, self.first_scheduled = [], [], []
        rows: list[PlanRow] = []
        budget = self._schedule_running(rows)
        self._admit(rows, budget, now)
        if not rows:
            return self._empty_plan()
        plan = StepPlan(self._step_id, tuple(rows), tuple(self._released_slots))
        self._released_slots.clear()
        self._step_id += 1
        self._is_in_flight = True
        return plan

    def _empty_plan(self) -> StepPlan:
        """Nothing is in flight after it, and released slots wait for the next plan that runs."""
        if self.waiting:
            raise EngineError(f"nothing runs and the queue's head cannot be admitted for lack of {self.wait_reason}")
        return StepPlan(self._step_id, ())

    def _schedule_running(self, rows: list[PlanRow]) -> int:
        """Returns the budget that is left.

        Every running row gets at least one token, in every step: it was admitted with one when those before it had
        theirs, and what a row takes never grows, but for the last one's, which took what was left.
        """
        budget, index = self.max_num_batched_tokens, 0
        while index < len(self.running):
            sequence = self.running[index]
            start = sequence.num_computed_tokens
            count = min(len(sequence.token_ids) - start, self._max_chunk, budget)
            blocks = self._grow_or_preempt(sequence, start + count)
            if blocks is None:
                break
            rows.append(self._row(sequence, count, blocks))
            self.scheduled.append(sequence)
            budget -= count
            index += 1
        return budget

    def _grow_or_preempt(self, sequence: Sequence, num_tokens: int) -> NewBlocks | None:
        """New blocks for `sequence`, taken from later arrivals if need be; None if it had to go itself."""
        while True:
            blocks = self._kv.grow(sequence.tables, num_tokens)
            if blocks is not None:
                return blocks
            victim = latest_arrived(self.running)
            if victim is sequence and len(self.running) == 1:
                raise EngineError(f"a sequence of {num_tokens} tokens does not fit in the KV pool, even alone")
            self._preempt(victim)
            if victim is sequence:
                return None

    def _preempt(self, sequence: Sequence) -> None:
        self.preempted.append(Preempted(sequence, sequence.num_computed_tokens))
        self.counters.preemptions += 1
        self.running.remove(sequence)
        self._vacate(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        self.num_waiting_tokens += sequence.num_tokens

    def _admit(self, rows: list[PlanRow], budget: int, now: float) -> None:
        self.wait_reason = None
        while self.waiting:
            sequence = first_come_first_served(self.waiting)
            count = min(sequence.num_tokens, self._max_chunk, budget)
            self.wait_reason = self._why_wait(sequence, count)
            if self.wait_reason is not None:
                return
            blocks = self._kv.grow(sequence.tables, count)
            if blocks is None:
                raise EngineError("the KV pool lacks blocks that it said were free")
            self._start(sequence, now)
            rows.append(self._row(sequence, count, blocks))
            self.scheduled.append(sequence)
            budget -= count

    def _why_wait(self, sequence: Sequence, count: int) -> str | None:
        """Admission asks for room for all known tokens, not only for the first chunk, so that no half-computed prompt
        is admitted just to be preempted."""
        if self.preempted:
            return "preemption"
        if not self._free_slots:
            return "slots"
        if count < 1:
            return "tokens"
        return None if self._kv.can_grow(sequence.num_tokens, self._max_chunk) else "blocks"

    def _start(self, sequence: Sequence, now: float) -> None:
        self.waiting.remove(sequence)
        self.num_waiting_tokens -= sequence.num_tokens
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = now
            self.first_scheduled.append(sequence)
        self.running.append(sequence)

    def _row(self, sequence: Sequence, count: int, blocks: NewBlocks) -> PlanRow:
        start = sequence.num_computed_tokens
        end = start + count
        state = None if sequence.in_slot else sequence.slot_state(self._end_tokens)
        token_ids = () if sequence.sampled_in_slot else tuple(sequence.token_ids[start:end])
        sequence.in_slot = True
        sequence.num_scheduled_tokens = count
        sample = end == len(sequence.token_ids) and not sequence.only_prompt
        first, targets = sequence.score_span(start, end)
        return PlanRow(
            sequence.slot,
            start,
            count,
            token_ids,
            blocks,
            sample,
            state,
            score_first=first,
            score_targets=targets,
            num_pooled=sequence.num_pooled(start, end),
        )

    def commit(self, plan: StepPlan, result: StepResult) -> list[Committed]:
        """Apply a result: counters advance, tokens are appended, ended sequences leave, window blocks are freed.

        Rows of sequences that finished in flight are dropped and their blocks freed. Returns what is worth telling:
        nothing for a chunk in the middle of a prompt. Raises EngineError for a result that is not of this plan.
        """
        fits = self._is_in_flight and result.step_id == plan.step_id == self._step_id - 1
        if not fits or len(result.rows) != len(self.scheduled):
            raise EngineError(f"the result of step {result.step_id} does not fit the plan of step {plan.step_id}")
        committed: list[Committed] = []
        for sequence, row, row_result in zip(self.scheduled, plan.rows, result.rows, strict=True):
            sequence.num_scheduled_tokens = 0
            if sequence.status is SequenceStatus.FINISHED:
                continue
            gained = self._commit_row(sequence, row, row_result)
            if gained is not None:
                committed.append(gained)
        self._is_in_flight = False
        self._free_leaving()
        return committed

    def _commit_row(self, sequence: Sequence, row: PlanRow, result: RowResult) -> Committed | None:
        if result.status is not RowStatus.OK or (row.sample and not result.token_ids):
            self.finish(sequence, FinishReason.ERROR)
            error = ROW_ERRORS.get(result.status, ROW_ERRORS[RowStatus.ERROR])
            return Committed(sequence=sequence, finish_reason=FinishReason.ERROR, error=error)
        sequence.num_computed_tokens += row.num_tokens
        self._count_prompt(sequence)
        self._kv.release_window(sequence.tables, sequence.num_computed_tokens)
        sequence.prompt_scores.extend(result.scores)
        if row.sample:
            return self._take_tokens(sequence, result)
        if sequence.only_prompt and sequence.num_computed_tokens == sequence.num_prompt_tokens:
            return self._end_prompt(sequence, result)
        return None

    def _end_prompt(self, sequence: Sequence, result: RowResult) -> Committed:
        self.finish(sequence, FinishReason.LENGTH)
        return Committed(
            sequence=sequence,
            prompt_logprobs=tuple(sequence.prompt_scores),
            pooled=result.pooled,
            finish_reason=FinishReason.LENGTH,
        )

    def _take_tokens(self, sequence: Sequence, result: RowResult) -> Committed:
        is_first = sequence.num_output_tokens == 0
        sequence.token_ids.extend(result.token_ids)
        sequence.sampled_in_slot = True
        self.counters.generation_tokens += len(result.token_ids)
        ended = sequence.ends_with(result.token_ids[-1], self._end_tokens)
        reason = FinishReason.STOP if ended else None
        if reason is None and sequence.num_output_tokens >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish(sequence, reason)
        return Committed(
            sequence=sequence,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            prompt_logprobs=tuple(sequence.prompt_scores) if is_first else (),
            ended_by_token=ended,
            finish_reason=reason,
        )

    def _count_prompt(self, sequence: Sequence) -> None:
        reached = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        if reached > sequence.num_counted_tokens:
            if sequence.index == 0:
                self.counters.prompt_tokens += reached - sequence.num_counted_tokens
            sequence.num_counted_tokens = reached

    def fail_step(self) -> list[Sequence]:
        """After an exception in schedule, execute or commit: end with ERROR what the step touched, free it all.

        That is the step's sequences; if the step was not planned yet, all running ones; if there are none, the queue's
        head (so that a fault of one request cannot stop the queue for ever). Returns them, the finished ones included.
        """
        touched = self.scheduled if self._is_in_flight else list(self.running) or list(self.waiting)[:1]
        self._is_in_flight = False
        for sequence in touched:
            sequence.num_scheduled_tokens = 0
            self.finish(sequence, FinishReason.ERROR)
        self._free_leaving()
        # Nobody knows which slots the executor still has; the first row of the next stay empties a slot in any case.
        self._released_slots.clear()
        return touched

    def live(self) -> list[Sequence]:
        """Sequences that hold blocks."""
        return [*self.running, *self._leaving]

    def check(self) -> None:
        """Recount blocks, slots, queue and order. Raises EngineError on any mismatch. For tests and after faults."""
        live = self.live()
        self._kv.check([sequence.tables for sequence in live])
        slots = sorted([*self._free_slots, *(sequence.slot for sequence in live)])
        if slots != list(range(self.max_num_seqs)):
            raise EngineError(f"slots in use and free slots do not add up: {slots}")
        if self.num_waiting_tokens != sum(sequence.num_tokens for sequence in self.waiting):
            raise EngineError("the count of waiting tokens is wrong")
        order = [sequence.id for sequence in (*self.running, *self.waiting)]
        if order != sorted(set(order)):
            raise EngineError("sequences are not in arrival order")

    def _free_leaving(self) -> None:
        for sequence in self._leaving:
            sequence.num_scheduled_tokens = 0
            self._vacate(sequence)
        self._leaving.clear()

    def _vacate(self, sequence: Sequence) -> None:
        """Give back blocks and slot. The executor hears of the slot with the next plan."""
        self._kv.free(sequence.tables)
        if sequence.slot != NO_SLOT:
            self._free_slots.append(sequence.slot)
            self._released_slots.append(sequence.slot)
        sequence.leave_slot()
