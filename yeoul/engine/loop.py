"""Engine: the synchronous core. One step is drain, schedule, execute, commit, emit.

Owns requests from the inbox to their last output, the fault barriers and the counters. Must not know threads, event
loops or HTTP: one thread calls `step`; any one other thread (or the same) may call `add`, `abort`, `check`, `stats`.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from yeoul.engine.client import EngineInfo, EngineStats
from yeoul.engine.clock import Clock, Stopwatch
from yeoul.engine.output import Grammars, GrammarState, SequenceOutput, TextState, ended
from yeoul.engine.request_check import check_contents
from yeoul.engine.step_log import EventRecord, StepLog
from yeoul.engine.step_record import step_record
from yeoul.engine.step_sizes import StepSizes
from yeoul.engine.timeline import follow_plan, follow_step
from yeoul.errors import CapacityError, EngineDeadError, RequestError, YeoulError
from yeoul.exec.protocol import Executor
from yeoul.kv.manager import KVManager
from yeoul.sched.results import Committed
from yeoul.sched.scheduler import Scheduler
from yeoul.sched.sequence import Sequence, SequenceStatus
from yeoul.step import StepPlan, StepResult
from yeoul.types import FinishReason, Request, SamplingParams, Structured, TokenOutput

log = logging.getLogger(__name__)

STEP_FAILED = "the engine failed while computing this request; it goes on with others"
GRAMMAR_FAILED = "the engine failed while following this request's grammar"
OUTPUT_FAILED = "the engine failed while making this request's output"


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one step has to tell; one message, however many rows."""

    outputs: list[TokenOutput]
    first_scheduled: list[tuple[str, float]]
    """(request id, engine's clock) of the requests whose first sequence started."""


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What an engine is put together from; see `engine/build.py`."""

    info: EngineInfo
    scheduler: Scheduler
    kv: KVManager
    executor: Executor
    make_text: Callable[[SamplingParams], TextState]
    clock: Clock
    step_log: StepLog
    seed: int
    """Of the generator of unseeded requests' seeds."""
    max_waiting_tokens: int
    tokenizer: Any = None
    """yeoul.text.tokenizer.Tokenizer, for those who hold the engine; the engine itself does not use it."""
    grammars: Grammars | None = None
    """yeoul.text.grammar.GrammarCompiler; None: structured output is refused."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """The model file's key-value pairs."""


class Engine:
    """The core: `add` requests, `step` while `has_work`, deliver what steps return."""

    def __init__(self, parts: EngineParts) -> None:
        self.info = parts.info
        self.tokenizer = parts.tokenizer
        self.grammars = parts.grammars
        self.metadata = parts.metadata
        self.clock = parts.clock
        self.step_log = parts.step_log
        self._scheduler = parts.scheduler
        self._kv = parts.kv
        self._executor = parts.executor
        self._make_text = parts.make_text
        self._random = random.Random(parts.seed)
        self._max_waiting_tokens = parts.max_waiting_tokens
        self._inbox: deque[tuple[Request, float] | str] = deque()
        # One writer each (the caller of add; the engine's thread), so that the differences need no lock.
        self._num_submitted = self._num_submitted_tokens = 0
        self._num_taken = self._num_taken_tokens = 0
        self._requests: dict[str, list[Sequence]] = {}
        self._outputs: dict[int, SequenceOutput] = {}
        self._undelivered: list[TokenOutput] = []
        self._next_sequence_id = 0
        self._num_steps = 0
        self._step_sizes = StepSizes()
        self._finished = dict.fromkeys((str(reason) for reason in FinishReason), 0)
        self._last_loop_at = parts.clock.now()
        self._closed = False

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._inbox or self._undelivered or self._scheduler.has_work)

    def check(self, request: Request) -> None:
        """Refuse what can never be served, or not now.

        Raises RequestError (empty prompt, token id out of range), ContextLengthError, CapacityError.
        """
        # First the length, which is cheap.
        self._scheduler.check_fits(len(request.prompt_token_ids))
        check_contents(request, self.info.vocab_size)
        self._check_capacity(_num_tokens(request))

    def _check_capacity(self, num_tokens: int) -> None:
        """An empty queue takes anything that fits: it may start at once."""
        waiting = self._num_waiting_tokens()
        if waiting and waiting + num_tokens > self._max_waiting_tokens:
            raise CapacityError(
                f"{waiting} prompt tokens are waiting; with {num_tokens} more the limit of "
                f"{self._max_waiting_tokens} is exceeded",
                hint=f"try again later, or start the engine with --max-waiting-tokens {waiting + num_tokens}",
            )

    def add(self, request: Request) -> None:
        """Put a request into the inbox. It should have passed `check`; one that does not fit ends with ERROR."""
        self._num_submitted += request.params.n
        self._num_submitted_tokens += _num_tokens(request)
        self._inbox.append((request, self.clock.now()))

    def abort(self, request_id: str) -> None:
        """End a request's sequences with ABORT at the next step. Unknown ids are ignored. Never blocks."""
        self._inbox.append(request_id)

    def step(self) -> StepMessage:
        """Go round once: take what came in, plan, compute, apply, tell.

        Faults end the requests they concern. Raises EngineDeadError if the books do not balance after a fault; then
        the engine must not be used any more.
        """
        watch = Stopwatch(self.clock)
        message = StepMessage(outputs=[], first_scheduled=[])
        self._drain(message, watch)
        if self._scheduler.has_work:
            try:
                plan = self._constrain(self._schedule(message, watch), message)
                result = self._execute(plan, watch)
                committed = self._commit(plan, result, watch)
                self._emit(committed, message, watch)
                self.step_log.append(step_record(self._scheduler, self._kv, plan, result, watch))
            except BaseException as error:
                self._fail_step(error, message)
        self._last_loop_at = watch.lap()
        return message

    def idle(self) -> None:
        """Called now and then while there is no work: the loop lives, buffered log lines go out."""
        self._last_loop_at = self.clock.now()
        self.step_log.flush()

    def _drain(self, message: StepMessage, watch: Stopwatch) -> None:
        """Everything in the inbox, in order of arrival, and what an interrupted step could not deliver."""
        message.outputs.extend(self._undelivered)
        self._undelivered = []
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, str):
                self._abort(item, message)
            else:
                self._open(*item, message)
        watch.lap()

    def _open(self, request: Request, arrived_at: float, message: StepMessage) -> None:
        """Make and queue the request's sequences. If that fails the request ends with ERROR, as n outputs."""
        params = request.params
        self._num_taken += params.n
        self._num_taken_tokens += _num_tokens(request)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        sequences = [Sequence(request, index, seed, self._new_id(), arrived_at) for index in range(params.n)]
        for sequence in sequences:
            sequence.siblings = sequences
        self._event("arrive", request, at=arrived_at, num_tokens=len(request.prompt_token_ids))
        try:
            if request.request_id in self._requests:
                raise RequestError(f"request id {request.request_id} is in use")
            outputs = [self._output(sequence) for sequence in sequences]
            for sequence in sequences:
                self._scheduler.add(sequence)
        except Exception as error:
            self._refuse(sequences, error, message)
            return
        self._requests[request.request_id] = sequences
        self._outputs.update((output.sequence.id, output) for output in outputs)
        self._event("admit", request, seed=seed % 2**64)

    def _output(self, sequence: Sequence) -> SequenceOutput:
        params = sequence.request.params
        grammar = None if params.structured is None else self.start_grammar(params.structured)
        return SequenceOutput(sequence, self._make_text(params), grammar)

    def start_grammar(self, structured: Structured) -> GrammarState:
        """A grammar at its beginning, compiled unless it was lately used. Raises RequestError where it cannot be."""
        if self.grammars is None:
            raise RequestError("this engine has no structured output", param=structured.param)
        return self.grammars.start(structured)

    def _new_id(self) -> int:
        self._next_sequence_id += 1
        return self._next_sequence_id

    def _refuse(self, sequences: list[Sequence], error: Exception, message: StepMessage) -> None:
        log.error("request %s could not be opened", sequences[0].request.request_id, exc_info=error)
        text = str(error) if isinstance(error, YeoulError) else OUTPUT_FAILED
        for sequence in sequences:
            if sequence in self._scheduler.waiting:
                self._scheduler.finish(sequence, FinishReason.ERROR)
            self._count_end(sequence, FinishReason.ERROR)
            message.outputs.append(ended(sequence, FinishReason.ERROR, error=text))

    def _abort(self, request_id: str, message: StepMessage) -> None:
        sequences = self._requests.get(request_id, ())
        if sequences:
            self._event("abort", sequences[0].request)
        for sequence in sequences:
            if sequence.id in self._outputs:
                self._deliver(sequence, self._outputs[sequence.id].abort, message)

    def _schedule(self, message: StepMessage, watch: Stopwatch) -> StepPlan:
        now = self.clock.now()
        plan = self._scheduler.schedule(now)
        self.step_log.plan(plan)
        follow_plan(self._outputs, self._scheduler, now)
        for sequence in self._scheduler.first_scheduled:
            self._event("first_schedule", sequence.request, at=now, index=sequence.index)
            if sequence.index == 0:
                message.first_scheduled.append((sequence.request.request_id, now))
        watch.lap()
        return plan

    def _constrain(self, plan: StepPlan, message: StepMessage) -> StepPlan:
        """The plan with the masks of the sequences that follow a grammar."""
        masks = {}
        for index, (sequence, row) in enumerate(zip(self._scheduler.scheduled, plan.rows, strict=True)):
            grammar = self._outputs[sequence.id].grammar
            if grammar is not None and row.sample:
                masks[index] = self._mask(sequence, grammar, message)
        if not masks:
            return plan
        rows = list(plan.rows)
        for index, mask in masks.items():
            rows[index] = msgspec.structs.replace(rows[index], mask=mask)
        return msgspec.structs.replace(plan, rows=tuple(rows))

    def _mask(self, sequence: Sequence, grammar: GrammarState, message: StepMessage) -> bytes:
        """The fault barrier around one sequence's grammar. A sequence that ends here has its result dropped."""
        try:
            return grammar.mask()
        except Exception:
            log.exception("grammar of request %s failed", sequence.request.request_id)
        message.outputs.append(ended(sequence, FinishReason.ERROR, error=GRAMMAR_FAILED))
        self._close_sequence(sequence, FinishReason.ERROR)
        return b""

    def _execute(self, plan: StepPlan, watch: Stopwatch) -> StepResult:
        result = self._executor.collect(self._executor.submit(plan))
        self._num_steps += 1
        self._step_sizes.count(plan.num_tokens)
        follow_step(self._outputs, self._scheduler, plan, watch.lap())
        return result

    def _commit(self, plan: StepPlan, result: StepResult, watch: Stopwatch) -> list[Committed]:
        committed = self._scheduler.commit(plan, result)
        watch.lap()
        return committed

    def _emit(self, committed: list[Committed], message: StepMessage, watch: Stopwatch) -> None:
        for gained in committed:
            sequence = gained.sequence
            self._deliver(sequence, self._outputs[sequence.id].advance, message, gained)
        watch.lap()

    def _deliver(
        self, sequence: Sequence, make: Callable[..., TokenOutput], message: StepMessage, *args: Committed
    ) -> None:
        """The fault barrier around one sequence's output: an exception ends this sequence and no other."""
        try:
            output = make(*args)
        except Exception:
            log.exception("output of request %s failed", sequence.request.request_id)
            output = ended(sequence, FinishReason.ERROR, error=OUTPUT_FAILED)
        message.outputs.append(output)
        if output.token_ids and output.num_output_tokens == len(output.token_ids):
            self._event("deliver", sequence.request, index=sequence.index)
        if output.finish_reason is not None:
            self._close_sequence(sequence, output.finish_reason)

    def _close_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """The one place where a sequence that was opened ends, right after its terminal output."""
        self._scheduler.finish(sequence, reason)
        del self._outputs[sequence.id]
        request_id = sequence.request.request_id
        if not any(other.id in self._outputs for other in self._requests[request_id]):
            del self._requests[request_id]
        self._count_end(sequence, reason)

    def _count_end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._finished[reason] += 1
        count = sequence.num_output_tokens
        self._event("finish", sequence.request, index=sequence.index, reason=reason, num_tokens=count)

    def _fail_step(self, error: BaseException, message: StepMessage) -> None:
        """The fault barrier around the step: what it touched ends with ERROR, everything is freed and recounted."""
        log.error("a step failed", exc_info=error)
        self.step_log.crash(error, self.clock.now())
        self._scheduler.fail_step()
        for output in list(self._outputs.values()):
            if output.sequence.status is SequenceStatus.FINISHED:
                message.outputs.append(ended(output.sequence, FinishReason.ERROR, error=STEP_FAILED))
                self._close_sequence(output.sequence, FinishReason.ERROR)
        try:
            self.check_books()
        except YeoulError as mismatch:
            raise EngineDeadError(f"the engine's books do not balance after a fault: {mismatch}") from error
        if not isinstance(error, Exception):
            self._undelivered = message.outputs
            raise error

    def check_books(self) -> None:
        """Recount blocks, slots and the queue from the live sequences. Raises EngineError on a mismatch."""
        self._scheduler.check()

    def stats(self) -> EngineStats:
        """A snapshot; any thread."""
        counters = self._scheduler.counters
        slots = self._scheduler.slots()
        step_sizes, step_tokens = self._step_sizes.snapshot()
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + self._num_submitted - self._num_taken,
            num_waiting_tokens=self._num_waiting_tokens(),
            kv_used_blocks=sum(pool.num_used for pool in self._kv.pools),
            kv_cached_blocks=sum(pool.num_cached for pool in self._kv.pools),
            kv_total_blocks=sum(pool.capacity for pool in self._kv.pools),
            kv_computed_slots=slots.computed,
            kv_partial_slots=slots.partial,
            kv_reserved_slots=slots.reserved,
            kv_over_reserved_slots=slots.over_reserved,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.preemptions,
            lost_tokens=counters.lost_tokens,
            swapped_tokens=counters.swapped_tokens,
            swap_used_bytes=self._scheduler.swap_used,
            forks=counters.forks,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_steps=self._num_steps,
            step_sizes=step_sizes,
            step_tokens=step_tokens,
            finished=dict(self._finished),
            last_step_age=self.clock.now() - self._last_loop_at,
            alive=not self._closed,
        )

    def close(self) -> None:
        """Free the executor and close the log. Idempotent; call it from the thread that steps, or when none does."""
        if not self._closed:
            self._closed = True
            self._executor.close()
            self.step_log.close()

    def _num_waiting_tokens(self) -> int:
        return self._num_submitted_tokens - self._num_taken_tokens + self._scheduler.num_waiting_tokens

    def _event(
        self,
        event: str,
        request: Request,
        *,
        at: float | None = None,
        index: int | None = None,
        seed: int | None = None,
        num_tokens: int | None = None,
        reason: str | None = None,
    ) -> None:
        record = EventRecord(
            event=event,
            at=self.clock.now() if at is None else at,
            request=request.request_id,
            index=index,
            seed=seed,
            num_tokens=num_tokens,
            reason=reason,
        )
        self.step_log.append(record)


def _num_tokens(request: Request) -> int:
    """Prompt tokens that a request puts into the queue: each of its n sequences computes the prompt."""
    return len(request.prompt_token_ids) * request.params.n
