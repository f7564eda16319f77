"""Scheduler: decides what the next step computes and applies what came of it.

Owns the queue, the running list, the slots and every change of a Sequence. Must not know time (it is told), tensors,
text or who asked. One token budget per step: running rows first, chunks of waiting prompts fill the rest. Policies
(`policies.py`) choose who is admitted and who is preempted.

`waiting` is in order of arrival, whatever the order of admission; `running` is in order of admission.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from yeoul.errors import EngineError
from yeoul.kv.manager import KVManager, NewBlocks, SlotUsage
from yeoul.kv.swap import SwapSpace
from yeoul.sched.admission import Admission
from yeoul.sched.draft import PlanDraft
from yeoul.sched.policies import Policies, choose_victim
from yeoul.sched.results import ROW_ERRORS, Committed, Preempted, SchedulerCounters
from yeoul.sched.room import RoomFor, check_fits, check_window
from yeoul.sched.sequence import NO_SLOT, Sequence, SequenceStatus
from yeoul.sched.swapping import Swapping
from yeoul.step import PlanRow, RowResult, RowStatus, StepPlan, StepResult
from yeoul.types import FinishReason


class Scheduler:
    """Continuous batching with chunked prefill, unless the policies say otherwise. One step may be in flight."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        end_tokens: frozenset[int] = frozenset(),
        room_for: RoomFor | None = None,
        policies: Policies | None = None,
        swap_space: SwapSpace | None = None,
    ) -> None:
        """Raises ConfigError for a pool that cannot hold the window of a single sequence."""
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
        """Why nobody more was admitted by the last `schedule`: slots, tokens, blocks, preemption, fork or batch."""
        self._kv = kv
        self._policies = policies or Policies()
        self._admission = Admission(kv, self._policies)
        self._swapping = Swapping(kv, swap_space)
        self._end_tokens = end_tokens
        self._room_for = room_for
        self._max_chunk = kv.max_chunk(max_num_batched_tokens, self.max_model_len)
        check_window(self._max_chunk)
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
        check_fits(num_prompt_tokens, self.max_model_len, self._room_for)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Clamps its max_tokens to the context. Raises what `check_fits` raises."""
        self.check_fits(sequence.num_prompt_tokens)
        room = self.max_model_len - sequence.num_prompt_tokens
        sequence.max_tokens = min(room, sequence.max_tokens)
        limit = sequence.num_prompt_tokens + sequence.max_tokens
        sequence.tables = self._kv.open(sequence.token_ids, salt=sequence.request.cache_salt, limit=limit)
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
            self._swapping.drop(sequence)
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
        draft = PlanDraft(self.max_num_batched_tokens, self._end_tokens)
        self._fill(draft, now)
        if not draft.rows:
            return self._empty_plan()
        self.scheduled = draft.scheduled
        plan = draft.plan(self._step_id, self._released_slots, self._swapping)
        self._released_slots.clear()
        self._swapping.planned()
        self._step_id += 1
        self._is_in_flight = True
        return plan

    def _fill(self, draft: PlanDraft, now: float) -> None:
        """Running rows first, then whoever may start; with `prefill_first`, tokens to sample wait for all prompts."""
        if self._policies.batching != "prefill_first":
            self._schedule_running(draft, self.running, now)
            self._admit(draft, now)
            return
        self._schedule_running(draft, [one for one in self.running if not one.sampled_in_slot], now)
        self._admit(draft, now)
        if not draft.rows:
            self._schedule_running(draft, self.running, now)

    def _empty_plan(self) -> StepPlan:
        """Nothing is in flight after it, and released slots wait for the next plan that runs."""
        if self.waiting:
            raise EngineError(f"nothing runs and nobody of the queue can be admitted for lack of {self.wait_reason}")
        return StepPlan(self._step_id, ())

    def _schedule_running(self, draft: PlanDraft, sequences: list[Sequence], now: float) -> None:
        """Grant each what it needs, then plan the rows of those that were not preempted for another meanwhile.

        Under continuous batching everyone gets at least one token, in every step: it was admitted with one when those
        before it had theirs, and what a row takes never grows, but for the last one's, which took what was left.
        """
        granted: list[tuple[Sequence, int, NewBlocks]] = []
        for sequence in list(sequences):
            start = sequence.num_computed_tokens
            count = min(len(sequence.token_ids) - start, self._max_chunk, draft.budget)
            if count < 1 or sequence.status is not SequenceStatus.RUNNING:
                continue
            blocks = self._grow_or_preempt(sequence, start + count, now)
            if blocks is not None:
                granted.append((sequence, count, blocks))
                draft.budget -= count
        for sequence, count, blocks in granted:
            if sequence.status is SequenceStatus.RUNNING:
                draft.add(sequence, count, blocks)

    def _grow_or_preempt(self, sequence: Sequence, num_tokens: int, now: float) -> NewBlocks | None:
        """New blocks for `sequence`, taken from those who rank lower if need be; None if it had to go itself."""
        while True:
            blocks = self._kv.grow(sequence.tables, num_tokens)
            if blocks is not None:
                return blocks
            victim = choose_victim(self.running, self._policies, now)
            if victim is sequence and len(self.running) == 1:
                raise EngineError(f"a sequence of {num_tokens} tokens does not fit in the KV pool, even alone")
            self._preempt(victim, sequence)
            if victim is sequence:
                return None

    def _preempt(self, sequence: Sequence, needed_by: Sequence) -> None:
        count = sequence.num_computed_tokens
        lost, kept = (0, count) if self._swapping.out(sequence) else (count, 0)
        self.preempted.append(Preempted(sequence, needed_by, lost, kept))
        self.counters.preemptions += 1
        self.counters.lost_tokens += lost
        self.counters.swapped_tokens += kept
        self.running.remove(sequence)
        self._vacate(sequence)
        sequence.status = SequenceStatus.WAITING
        insort(self.waiting, sequence, key=lambda one: one.id)
        self.num_waiting_tokens += sequence.num_tokens

    def _admit(self, draft: PlanDraft, now: float) -> None:
        self.wait_reason = None
        if not self.waiting:
            self._admission.end_of_step(None)
            return
        self.wait_reason = self._gate(draft)
        if self.wait_reason is None:
            for sequence in self._admission.candidates(self.waiting, now):
                self.wait_reason = self._gate(draft) or self._try_start(draft, sequence, now)
                if self.wait_reason is not None:
                    break
            else:
                self.wait_reason = "fork" if self.waiting else None
        self._admission.end_of_step(self.wait_reason)

    def _gate(self, draft: PlanDraft) -> str | None:
        return self._admission.gate(draft, len(self._free_slots), len(self.running), bool(self.preempted))

    def _try_start(self, draft: PlanDraft, sequence: Sequence, now: float) -> str | None:
        """Begin a stay; what is lacking if it cannot."""
        prefix, source = self._admission.prefix(sequence, draft.started)
        found = prefix.num_tokens
        rest = sequence.num_tokens - found
        if not self._admission.takes(draft, rest):
            return "tokens"
        count = min(rest, self._max_chunk, draft.budget)
        begin = self._kv.start if sequence.swapped is None else self._kv.restore
        start = begin(sequence.tables, prefix, found + count, sequence.num_tokens, self._max_chunk)
        if start is None:
            return "blocks"
        self._count_cached(sequence, found, source)
        self._start(sequence, now)
        self._swapping.back(sequence)
        sequence.num_computed_tokens = found
        draft.budget -= count
        draft.copies.extend(start.copies)
        draft.started.append(sequence)
        draft.add(sequence, count, start.blocks)
        return None

    def _count_cached(self, sequence: Sequence, num_tokens: int, source: Sequence | None) -> None:
        """A resumed sequence's own blocks are no hits, nor is what the first of n sequences left for the others."""
        self.counters.forks += source is not None
        if sequence.first_scheduled_at is not None:
            return
        sequence.num_cached_tokens = num_tokens if sequence.index == 0 else sequence.siblings[0].num_cached_tokens
        if sequence.index == 0:
            self.counters.prefix_cache_queries += sequence.num_prompt_tokens
            self.counters.prefix_cache_hits += num_tokens

    def _start(self, sequence: Sequence, now: float) -> None:
        self.waiting.remove(sequence)
        self.num_waiting_tokens -= sequence.num_tokens
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        if sequence.first_scheduled_at is None:
            sequence.first_scheduled_at = now
            self.first_scheduled.append(sequence)
        self.running.append(sequence)

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
        self._kv.publish(sequence.tables, sequence.num_computed_tokens)
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
        self._swapping.step_failed(lost.sequence for lost in self.preempted)
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

    @property
    def swap_used(self) -> int:
        """Bytes of swapped-out KV."""
        return self._swapping.used

    def slots(self) -> SlotUsage:
        """What the held token slots are for. A snapshot; any thread."""
        return self._kv.slots((sequence.tables, sequence.num_computed_tokens) for sequence in self.live())

    def check(self) -> None:
        """Recount blocks, slots, queue and order. Raises EngineError on any mismatch. For tests and after faults."""
        live = self.live()
        self._kv.check([sequence.tables for sequence in live])
        slots = sorted([*self._free_slots, *(sequence.slot for sequence in live)])
        if slots != list(range(self.max_num_seqs)):
            raise EngineError(f"slots in use and free slots do not add up: {slots}")
        if self.num_waiting_tokens != sum(sequence.num_tokens for sequence in self.waiting):
            raise EngineError("the count of waiting tokens is wrong")
        self._swapping.check(list(self.waiting))
        order = [sequence.id for sequence in self.waiting]
        if order != sorted(set(order)) or {sequence.id for sequence in live} & set(order):
            raise EngineError("the queue is not in order of arrival, or holds who runs")

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
