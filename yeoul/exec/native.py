"""NativeExecutor: runs plans on the C++ core, one call per step.

Owns slots (block tables, sampling state, last token) and the arrays of a step. Must not know sequences, requests or
text; what a step computes is the lowered program's business, when it runs the scheduler's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from yeoul import _native
from yeoul.config import isa_override
from yeoul.errors import ConfigError, EngineError
from yeoul.exec.kv_wire import fingerprint
from yeoul.exec.lowering import Lowering, PackedWeights
from yeoul.exec.native_blocks import NativeBlocks
from yeoul.exec.protocol import ExecutorLimits, Ticket
from yeoul.exec.swap import Swapper, SwapStore
from yeoul.models.model import Model
from yeoul.ops.passes import fuse
from yeoul.step import PlanRow, RowResult, RowStatus, SlotState, StepPlan, StepResult
from yeoul.types import MAX_LOGPROBS, KVSpec, TokenLogprob

SAMPLING = np.dtype(
    [
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("top_k", "i4"),
        ("seed", "u8"),
        ("sequence", "u4"),
        ("position", "u4"),
        ("num_logprobs", "i4"),
    ],
    align=True,
)
"""native/sampler.h SampleParams."""
RESULT = np.dtype(
    [
        ("token", "i4"),
        ("status", "i4"),
        ("logprob", "f4"),
        ("top_ids", "i4", MAX_LOGPROBS),
        ("top_logprobs", "f4", MAX_LOGPROBS),
    ],
    align=True,
)
"""native/sampler.h SampleResult."""
ROPE_STEP = 1024
"""Positions whose angles are computed at one time."""


def choose_isa(isa: str) -> tuple[str, str]:
    """The kernel level to use and why, `isa` being an option's value. Raises ConfigError for one that does not run here."""
    levels = _native.isa_levels()
    forced, reason = (isa, "asked for") if isa != "auto" else (isa_override(), "YEOUL_ISA")
    if forced is None:
        return levels[0], "the best this processor runs"
    if forced not in levels:
        raise ConfigError(
            f"kernel level {forced!r} does not run on this processor", hint=f"use one of {', '.join(levels)}", param="isa"
        )
    return forced, reason


class NativeExecutor:
    """See the module. Raises ConfigError for a level that does not run here, UnsupportedModelError for a model it cannot."""

    max_in_flight = 1

    def __init__(
        self,
        model: Model,
        limits: ExecutorLimits,
        *,
        isa: str = "auto",
        num_threads: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        swap_dir: str | None = None,
    ) -> None:
        self._isa, self._reason = choose_isa(isa)
        self._clock = clock
        self._vocab_size = model.spec.vocab_size
        self._limits = limits
        self._pool = _native.Pool(num_threads)
        program = fuse(model.program)
        self._weights = PackedWeights(program, model.weights, self._pool)
        tokens, positions = limits.max_num_batched_tokens, limits.max_model_len
        lowering = Lowering(program, model.weights, self._weights, max_tokens=tokens, max_positions=positions)
        table_width = -(-limits.max_model_len // limits.block_size) + 1
        groups = model.program.kv_groups
        self._tables = [np.zeros((limits.max_num_seqs, table_width), np.int32) for _ in groups]
        self._lengths = [[0] * limits.max_num_seqs for _ in groups]
        native_groups = [
            _kv_group(spec, len(layers), blocks, table)
            for (spec, layers), blocks, table in zip(groups, limits.num_blocks, self._tables, strict=True)
        ]
        self._program = _native.Program(self._pool, self._isa, lowering.arena_bytes, native_groups)
        lowering.emit(self._program)
        numerics = fingerprint("native", self._isa, model.spec, groups, _weight_types(model))
        self._swapper = Swapper(NativeBlocks(self._program, groups), numerics, SwapStore(swap_dir))
        self._failed_slots: frozenset[int] = frozenset()
        self._lowering = lowering
        self._ropes = lowering.ropes
        self._rope_end = 0
        self._states: list[SlotState | None] = [None] * limits.max_num_seqs
        self._last_token = np.full(limits.max_num_seqs, -1, np.int32)
        self._make_buffers(tokens, limits.max_num_seqs)
        self._results: dict[Ticket, StepResult | EngineError] = {}
        self._tickets = 0

    def submit(self, plan: StepPlan) -> Ticket:
        """Run the plan; its result, or its error, waits for `collect`."""
        ticket = Ticket(self._tickets)
        self._tickets += 1
        try:
            self._results[ticket] = self._run(plan)
        except EngineError as error:
            self._results[ticket] = error
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        """See Executor. Raises EngineError also for a ticket that was never given or already collected."""
        result = self._results.pop(ticket, EngineError(f"ticket {ticket} is unknown"))
        if isinstance(result, EngineError):
            raise result
        return result

    def logits(self, plan: StepPlan) -> np.ndarray:
        """See Executor: float32 [num_tokens, vocab]."""
        num_tokens = self._prepare(plan)
        self._gathered[:num_tokens] = np.arange(num_tokens)
        out = np.empty((num_tokens, self._vocab_size), np.float32)
        self._program.run(num_tokens, len(plan.rows), num_tokens, out, 0, len(self._program))
        return out

    def describe(self) -> str:
        """See Executor."""
        megabytes = self._weights.num_bytes / 1e6
        return f"native {self._isa} ({self._reason}), {self._pool.threads} threads, {megabytes:.0f} MB of packed weights"

    def close(self) -> None:
        """See Executor. The memory goes with the last reference."""
        self._results.clear()
        self._swapper.close()

    def _make_buffers(self, max_tokens: int, max_rows: int) -> None:
        gathered = max(max_tokens, max_rows)
        self._tokens = np.zeros(max_tokens, np.int32)
        self._positions = np.zeros(max_tokens, np.int32)
        self._rows = np.zeros((max_rows, 4), np.int32)
        self._gathered = np.zeros(gathered, np.int32)
        self._sampling = np.zeros(gathered, SAMPLING)
        self._sampled = np.zeros(gathered, RESULT)
        self._row_nan = np.zeros(max_rows, np.uint8)
        self._iota = np.arange(self._limits.max_model_len + 1, dtype=np.int32)
        if SAMPLING.itemsize != _native.SAMPLE_PARAMS_BYTES or RESULT.itemsize != _native.SAMPLE_RESULT_BYTES:
            raise EngineError("the native core was built from another version: build it again")
        sampling, sampled = self._sampling.view(np.uint8), self._sampled.view(np.uint8)
        self._program.bind(self._tokens, self._positions, self._rows, self._gathered, sampling, sampled, self._row_nan)

    def _run(self, plan: StepPlan) -> StepResult:
        started = self._clock()
        num_tokens = self._prepare(plan)
        num_sampled = self._prepare_sampling(plan)
        self._program.run(num_tokens, len(plan.rows), num_sampled, None, 0, len(self._program))
        rows = self._collect_rows(plan)
        return StepResult(plan.step_id, rows, started, self._clock())

    def _prepare(self, plan: StepPlan) -> int:
        """Fill the step's arrays; returns the number of tokens. Raises EngineError for a plan that does not fit."""
        for slot in plan.released_slots:
            self._states[slot] = None
        self._swapper.out(plan.dropped_swaps, plan.swap_outs)
        for copy in plan.block_copies:
            self._program.copy_block(copy.group, copy.source, copy.target)
        self._failed_slots = self._swapper.back(plan.swap_ins)
        if len(plan.rows) > len(self._rows) or plan.num_tokens > len(self._tokens):
            raise EngineError(f"step {plan.step_id} is larger than the executor was built for")
        begin = 0
        for index, row in enumerate(plan.rows):
            self._enter(row)
            end = begin + row.num_tokens
            self._tokens[begin:end] = row.token_ids or self._last_token[row.slot]
            self._positions[begin:end] = self._iota[row.start : row.start + row.num_tokens]
            self._rows[index] = (row.slot, begin, row.num_tokens, row.start)
            begin = end
        self._check(begin, plan)
        self._row_nan[: len(plan.rows)] = 0
        return begin

    def _enter(self, row: PlanRow) -> None:
        """Note what is new in the row's slot: its state, its blocks. Raises EngineError before anything is out of bounds."""
        slot, end = row.slot, row.start + row.num_tokens
        if not 0 <= slot < self._limits.max_num_seqs or not 0 <= row.start < end <= self._limits.max_model_len:
            raise EngineError(f"row of slot {slot}, positions {row.start} to {end}, is out of bounds")
        if row.state is not None:
            self._states[slot] = row.state
            for lengths in self._lengths:
                lengths[slot] = 0
        if self._states[slot] is None:
            raise EngineError(f"slot {slot} has no state")
        for table, lengths, blocks in zip(self._tables, self._lengths, row.new_blocks, strict=True):
            if blocks:
                first = lengths[slot]
                lengths[slot] = first + len(blocks)
                table[slot, first : lengths[slot]] = blocks
            if lengths[slot] * self._limits.block_size < end:
                raise EngineError(f"slot {slot} has too few blocks for {end} tokens")

    def _check(self, num_tokens: int, plan: StepPlan) -> None:
        tokens = self._tokens[:num_tokens]
        if num_tokens and (tokens.min() < 0 or tokens.max() >= self._vocab_size):
            raise EngineError(f"step {plan.step_id} holds a token id outside the vocabulary of {self._vocab_size}")
        last = max((row.start + row.num_tokens for row in plan.rows), default=0)
        if last > self._rope_end:
            end = min(-(-last // ROPE_STEP) * ROPE_STEP, self._limits.max_model_len)
            for rope in self._ropes:
                rope.fill(self._rope_end, end)
            self._rope_end = end

    def _prepare_sampling(self, plan: StepPlan) -> int:
        count = 0
        for index, row in enumerate(plan.rows):
            state = self._states[row.slot]
            if row.sample and state is not None:
                self._gathered[count] = self._rows[index, 1] + row.num_tokens - 1
                self._sampling[count] = (
                    state.temperature,
                    state.top_p,
                    state.min_p,
                    max(state.top_k, 0),
                    state.seed,
                    state.sequence_index,
                    row.start + row.num_tokens,
                    state.num_logprobs,
                )
                count += 1
        return count

    def _collect_rows(self, plan: StepPlan) -> tuple[RowResult, ...]:
        results: list[RowResult] = []
        tokens, statuses = self._sampled["token"].tolist(), self._sampled["status"].tolist()
        nan_rows = self._row_nan.tolist()
        count = 0
        for index, row in enumerate(plan.rows):
            if row.slot in self._failed_slots:
                results.append(RowResult(status=RowStatus.ERROR))
            elif nan_rows[index]:
                results.append(RowResult(status=RowStatus.NAN))
            elif not row.sample:
                results.append(RowResult())
            elif statuses[count]:
                results.append(RowResult(status=RowStatus.NAN))
            else:
                self._last_token[row.slot] = tokens[count]
                results.append(RowResult((tokens[count],), self._logprobs(row.slot, count)))
            count += row.sample
        return tuple(results)

    def _logprobs(self, slot: int, index: int) -> tuple[TokenLogprob, ...]:
        state = self._states[slot]
        if state is None or state.num_logprobs < 0:
            return ()
        found = self._sampled[index]
        ids = found["top_ids"][: state.num_logprobs].tolist()
        values = found["top_logprobs"][: state.num_logprobs].tolist()
        top = tuple((i, value) for i, value in zip(ids, values, strict=True) if i >= 0)
        return (TokenLogprob(int(found["token"]), float(found["logprob"]), top),)


def _weight_types(model: Model) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, tensor.type.name) for name, tensor in model.weights.items()))


def _kv_group(spec: KVSpec, num_layers: int, num_blocks: int, table: np.ndarray) -> tuple[object, ...]:
    sizes = (num_blocks, spec.num_kv_heads, spec.key_size, spec.value_size)
    return (*sizes, spec.k_dtype, spec.v_dtype, spec.window, num_layers, table)
