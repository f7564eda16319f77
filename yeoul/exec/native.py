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
from yeoul.exec.native_outputs import NativeOutputs, logit_rules
from yeoul.exec.protocol import ExecutorLimits, Ticket
from yeoul.exec.swap import Swapper, SwapStore
from yeoul.models.model import Model
from yeoul.ops.passes import fuse
from yeoul.step import PlanRow, RowResult, RowStatus, SlotState, StepPlan, StepResult
from yeoul.types import KVSpec

NativeGroup = tuple[int, int, int, int, str, str, int, int, np.ndarray]
"""A KV group as the core takes it: blocks, heads, sizes, dtypes, window, layers, block tables."""
ROPE_STEP = 1024
"""Positions whose angles are computed at one time."""


def choose_isa(isa: str) -> tuple[str, str]:
    """The kernel level to use and why, by an option's value. Raises ConfigError for one that does not run here."""
    levels = _native.isa_levels()
    forced, reason = (isa, "asked for") if isa != "auto" else (isa_override(), "YEOUL_ISA")
    if forced is None:
        return levels[0], "the best this processor runs"
    if forced not in levels:
        raise ConfigError(
            f"kernel level {forced!r} does not run on this processor",
            hint=f"use one of {', '.join(levels)}",
            param="isa",
        )
    return forced, reason


class NativeExecutor:
    """See the module.

    Raises ConfigError for a level that does not run here, UnsupportedModelError for what the kernels cannot run.
    """

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
        numerics = fingerprint("native", self._isa, model.spec, groups, program.kv_scales, _weight_types(model))
        self._swapper = Swapper(NativeBlocks(self._program, groups), numerics, SwapStore(swap_dir))
        self._failed_slots: frozenset[int] = frozenset()
        self._lowering = lowering
        self._ropes = lowering.ropes
        self._rope_end = 0
        self._states: list[SlotState | None] = [None] * limits.max_num_seqs
        self._last_token = np.full(limits.max_num_seqs, -1, np.int32)
        self._rules: list[_native.LogitRules | None] = [None] * limits.max_num_seqs
        sizes = {"vocab_size": self._vocab_size, "hidden_size": program.head.x.dim}
        self._outputs = NativeOutputs(tokens, limits.max_num_seqs, **sizes)
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
        self._outputs.gathered[:num_tokens] = np.arange(num_tokens)
        out = np.empty((num_tokens, self._vocab_size), np.float32)
        self._program.run(num_tokens, len(plan.rows), num_tokens, num_tokens, out, 0, len(self._program))
        return out

    def describe(self) -> str:
        """See Executor."""
        megabytes = self._weights.num_bytes / 1e6
        return (
            f"native {self._isa} ({self._reason}), {self._pool.threads} threads, {megabytes:.0f} MB of packed weights"
        )

    def close(self) -> None:
        """See Executor. The memory goes with the last reference."""
        self._results.clear()
        self._swapper.close()

    def _make_buffers(self, max_tokens: int, max_rows: int) -> None:
        self._tokens = np.zeros(max_tokens, np.int32)
        self._positions = np.zeros(max_tokens, np.int32)
        self._rows = np.zeros((max_rows, 4), np.int32)
        self._row_nan = np.zeros(max_rows, np.uint8)
        self._iota = np.arange(self._limits.max_model_len + 1, dtype=np.int32)
        self._outputs.bind(self._program, self._tokens, self._positions, self._rows, self._row_nan)

    def _run(self, plan: StepPlan) -> StepResult:
        started = self._clock()
        num_tokens = self._prepare(plan)
        self._outputs.prepare(plan, self._rows[: len(plan.rows), 1].tolist(), self._states)
        num_gathered, num_logits = self._outputs.counts
        self._program.run(num_tokens, len(plan.rows), num_gathered, num_logits, None, 0, len(self._program))
        rows = self._collect_rows(plan)
        return StepResult(plan.step_id, rows, started, self._clock())

    def _prepare(self, plan: StepPlan) -> int:
        """Fill the step's arrays; returns the number of tokens. Raises EngineError for a plan that does not fit."""
        for slot in plan.released_slots:
            if not 0 <= slot < self._limits.max_num_seqs:
                raise EngineError(f"step {plan.step_id} releases slot {slot}, which does not exist")
            self._states[slot] = None
            self._set_rules(slot, None)
        self._move_blocks(plan)
        if len(plan.rows) > len(self._rows) or plan.num_tokens > len(self._tokens):
            raise EngineError(f"step {plan.step_id} is larger than the executor was built for")
        if len({row.slot for row in plan.rows}) < len(plan.rows):
            raise EngineError(f"step {plan.step_id} has two rows of one slot")
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

    def _move_blocks(self, plan: StepPlan) -> None:
        self._swapper.out(plan.dropped_swaps, plan.swap_outs)
        for copy in plan.block_copies:
            self._program.copy_block(copy.group, copy.source, copy.target)
        self._failed_slots = self._swapper.back(plan.swap_ins)

    def _enter(self, row: PlanRow) -> None:
        """Note what is new in the row's slot: its state, its blocks.

        Raises EngineError before anything is out of bounds.
        """
        slot, end = row.slot, row.start + row.num_tokens
        if not 0 <= slot < self._limits.max_num_seqs or not 0 <= row.start < end <= self._limits.max_model_len:
            raise EngineError(f"row of slot {slot}, positions {row.start} to {end}, is out of bounds")
        if row.num_tokens != (len(row.token_ids) or 1):
            raise EngineError(f"row of slot {slot} has {len(row.token_ids)} token ids for {row.num_tokens} tokens")
        if len(row.new_blocks) != len(self._tables):
            raise EngineError(f"row of slot {slot} has blocks for {len(row.new_blocks)} KV groups, not as the model")
        if row.state is not None:
            self._begin(slot, row.state)
            for lengths in self._lengths:
                lengths[slot] = 0
        if self._states[slot] is None:
            raise EngineError(f"slot {slot} has no state")
        for group, blocks in enumerate(row.new_blocks):
            if blocks:
                self._append_blocks(group, slot, blocks)
            if self._lengths[group][slot] * self._limits.block_size < end:
                raise EngineError(f"slot {slot} has too few blocks for {end} tokens")

    def _begin(self, slot: int, state: SlotState) -> None:
        self._states[slot] = state
        self._set_rules(slot, None if state.rules is None else logit_rules(state.rules, self._vocab_size))
        self._outputs.pooled[slot] = 0

    def _set_rules(self, slot: int, rules: _native.LogitRules | None) -> None:
        """Plain sequences, and there are mostly such, cost no call."""
        if rules is not None or self._rules[slot] is not None:
            self._rules[slot] = rules
            self._program.set_rules(slot, rules)

    def _append_blocks(self, group: int, slot: int, blocks: tuple[int, ...]) -> None:
        first, table = self._lengths[group][slot], self._tables[group]
        if min(blocks) < 0 or max(blocks) >= self._limits.num_blocks[group]:
            raise EngineError(f"slot {slot} gets a block outside the pool of {self._limits.num_blocks[group]}")
        if first + len(blocks) > table.shape[1]:
            raise EngineError(f"slot {slot} gets more blocks than {self._limits.max_model_len} tokens need")
        table[slot, first : first + len(blocks)] = blocks
        self._lengths[group][slot] = first + len(blocks)

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

    def _collect_rows(self, plan: StepPlan) -> tuple[RowResult, ...]:
        nan_rows = self._row_nan[: len(plan.rows)].tolist()
        results = self._outputs.collect(plan, self._states)
        for index, row in enumerate(plan.rows):
            if row.slot in self._failed_slots:
                results[index] = RowResult(status=RowStatus.ERROR)
            elif nan_rows[index]:
                results[index] = RowResult(status=RowStatus.NAN)
            elif results[index].token_ids:
                self._take(row.slot, results[index].token_ids[0])
        return tuple(results)

    def _take(self, slot: int, token: int) -> None:
        """Note what a slot sampled."""
        self._last_token[slot] = token
        rules = self._rules[slot]
        if rules is not None:
            rules.append(token)


def _weight_types(model: Model) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, tensor.type.name) for name, tensor in model.weights.items()))


def _kv_group(spec: KVSpec, num_layers: int, num_blocks: int, table: np.ndarray) -> NativeGroup:
    sizes = (num_blocks, spec.num_kv_heads, spec.key_size, spec.value_size)
    return (*sizes, spec.k_dtype, spec.v_dtype, spec.window, num_layers, table)
