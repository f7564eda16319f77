"""What the reference executor keeps between plans: slots with their block tables, and what position each place holds.

Owns the proof that a plan is sound: every key that a row reads was written for that position, and no row writes where
it may not. Must not know models or arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from yeoul.errors import EngineError
from yeoul.exec.protocol import ExecutorLimits
from yeoul.step import NULL_BLOCK, PlanRow, SlotState, StepPlan
from yeoul.types import KVSpec

Array = np.ndarray


@dataclass
class Slot:
    """One sequence's stay."""

    state: SlotState
    tables: list[list[int]]
    """Block ids, per KV group."""
    last_token: int | None = None
    history: list[int] = field(default_factory=list)
    """All tokens, where the state's rules need them; else those sampled in this stay."""

    pooled: Array | None = None
    """Sum of the hidden states that were pooled in this stay, float64 [dim]."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Note what was sampled."""
        self.last_token = token_ids[-1] if token_ids else None
        self.history.extend(token_ids)

    def pool(self, hidden: Array) -> bytes:
        """Add rows [.., dim] to the sum, one after the other, and return it as RowResult holds it."""
        total = np.zeros(hidden.shape[1]) if self.pooled is None else self.pooled
        for row in hidden:
            total = total + row
        self.pooled = total
        return total.astype("<f8").tobytes()


@dataclass(frozen=True)
class RowFrame:
    """One row, ready to compute: which of the step's tokens it has, and where its keys lie."""

    slot: Slot
    begin: int
    """Index of its first token among the step's tokens."""
    start: int
    count: int
    tables: tuple[Array, ...]
    """Per KV group: block ids, int64."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.count


@dataclass(frozen=True)
class Frame:
    """One step, ready to compute. `tokens` and `positions` are int64 [T]."""

    rows: tuple[RowFrame, ...]
    tokens: Array
    positions: Array


class Slots:
    """All slots of an executor."""

    def __init__(self, groups: Sequence[KVSpec], limits: ExecutorLimits, vocab_size: int) -> None:
        self._groups = groups
        self._limits = limits
        self._vocab_size = vocab_size
        self._slots: dict[int, Slot] = {}
        self._held = [np.full((blocks, limits.block_size), -1, np.int64) for blocks in limits.num_blocks]
        """The position that each KV slot was last written for."""
        self._swapped: dict[int, list[Array]] = {}
        """By handle: what `_held` said of the blocks, per KV group."""

    def prepare(self, plan: StepPlan) -> Frame:
        """Apply a plan to the slots and check all of it.

        Raises EngineError, naming step and row, for a plan that does not fit the limits, writes to the null block, to
        one place twice or past its table, reads what was never written for that position, or names a token outside the
        vocabulary.
        """
        for slot in plan.released_slots:
            if self._slots.pop(slot, None) is None:
                raise EngineError(f"step {plan.step_id}: slot {slot} is released but not taken")
        self._move(plan)
        if plan.num_tokens > self._limits.max_num_batched_tokens:
            raise EngineError(f"step {plan.step_id}: {plan.num_tokens} tokens are more than the executor was built for")
        rows, tokens = self._rows(plan)
        self._write(plan, rows)
        for index, row in enumerate(rows):
            self._check_reads(f"step {plan.step_id}, row {index}", row)
        positions = [np.arange(row.start, row.end) for row in rows]
        return Frame(tuple(rows), np.array(tokens, np.int64), np.concatenate(positions or [np.zeros(0, np.int64)]))

    def _move(self, plan: StepPlan) -> None:
        """What the plan says of blocks: drops, swaps out, copies, swaps in."""
        for handle in plan.dropped_swaps:
            self._swapped.pop(handle, None)
        for out in plan.swap_outs:
            self._check_blocks(plan, out.blocks)
            self._swapped[out.handle] = [held[list(ids)] for held, ids in zip(self._held, out.blocks, strict=True)]
        for copy in plan.block_copies:
            named = tuple((copy.source, copy.target) if group == copy.group else () for group in range(len(self._held)))
            self._check_blocks(plan, named)
            self._held[copy.group][copy.target] = self._held[copy.group][copy.source]
        for back in plan.swap_ins:
            self._check_blocks(plan, back.blocks)
            kept = self._swapped.pop(back.handle, None)
            if kept is None or [len(rows) for rows in kept] != [len(ids) for ids in back.blocks]:
                raise EngineError(f"step {plan.step_id}: swap {back.handle} brings back what never went out")
            for held, ids, rows in zip(self._held, back.blocks, kept, strict=True):
                held[list(ids)] = rows

    def _check_blocks(self, plan: StepPlan, blocks: Sequence[Sequence[int]]) -> None:
        for ids, limit in zip(blocks, self._limits.num_blocks, strict=True):
            if not all(NULL_BLOCK < block < limit for block in ids):
                raise EngineError(f"step {plan.step_id}: a block to copy or swap does not exist")

    def _rows(self, plan: StepPlan) -> tuple[list[RowFrame], list[int]]:
        rows: list[RowFrame] = []
        tokens: list[int] = []
        seen: set[int] = set()
        for index, row in enumerate(plan.rows):
            where = f"step {plan.step_id}, row {index}"
            if row.slot in seen:
                raise EngineError(f"{where}: slot {row.slot} has two rows in one step")
            seen.add(row.slot)
            slot = self._enter(where, row)
            tables = tuple(np.array(table, np.int64) for table in slot.tables)
            rows.append(RowFrame(slot, len(tokens), row.start, row.num_tokens, tables))
            tokens += self._tokens(where, row, slot)
        return rows, tokens

    def _enter(self, where: str, row: PlanRow) -> Slot:
        """The row's slot, with its new blocks appended."""
        if not 0 <= row.slot < self._limits.max_num_seqs:
            raise EngineError(f"{where}: slot {row.slot} does not exist")
        if row.state is not None:
            history = [] if row.state.rules is None else list(row.state.rules.history)
            self._slots[row.slot] = Slot(row.state, [[] for _ in self._groups], history=history)
        slot = self._slots.get(row.slot)
        if slot is None:
            raise EngineError(f"{where}: slot {row.slot} has no state")
        if len(row.new_blocks) != len(self._groups):
            raise EngineError(f"{where}: blocks for {len(row.new_blocks)} KV groups, the model has {len(self._groups)}")
        for table, blocks, limit in zip(slot.tables, row.new_blocks, self._limits.num_blocks, strict=True):
            if not all(0 <= block < limit for block in blocks):
                raise EngineError(f"{where}: a block id lies outside the pool of {limit}")
            table.extend(blocks)
        return slot

    def _tokens(self, where: str, row: PlanRow, slot: Slot) -> Sequence[int]:
        if row.num_tokens < 1 or row.start < 0 or row.start + row.num_tokens > self._limits.max_model_len:
            raise EngineError(f"{where}: {row.num_tokens} tokens from position {row.start} do not fit")
        tokens: Sequence[int] = row.token_ids
        if not tokens:
            if slot.last_token is None:
                raise EngineError(f"{where}: no token was sampled for slot {row.slot}")
            tokens = (slot.last_token,)
        if len(tokens) != row.num_tokens:
            raise EngineError(f"{where}: {len(tokens)} token ids for {row.num_tokens} tokens")
        if not all(0 <= token < self._vocab_size for token in tokens):
            raise EngineError(f"{where}: a token id lies outside the vocabulary of {self._vocab_size}")
        return tokens

    def _write(self, plan: StepPlan, rows: Sequence[RowFrame]) -> None:
        """Note the positions that this step writes, after making sure that it may."""
        for group, held in enumerate(self._held):
            written: set[tuple[int, int]] = set()
            for index, row in enumerate(rows):
                where = f"step {plan.step_id}, row {index}, KV group {group}"
                blocks, offsets = self.places(where, row, group, row.start, row.end)
                places = set(zip(blocks.tolist(), offsets.tolist(), strict=True))
                if NULL_BLOCK in blocks or len(places) < row.count or places & written:
                    raise EngineError(f"{where}: writes to the null block, or to one place twice")
                written |= places
                held[blocks, offsets] = np.arange(row.start, row.end)

    def _check_reads(self, where: str, row: RowFrame) -> None:
        for group, spec in enumerate(self._groups):
            first = first_key(row.start, spec.window)
            blocks, offsets = self.places(f"{where}, KV group {group}", row, group, first, row.end)
            wrong = np.flatnonzero(self._held[group][blocks, offsets] != np.arange(first, row.end))
            if len(wrong):
                raise EngineError(
                    f"{where}, KV group {group}: position {first + wrong[0]} was never written to its block"
                )

    def places(self, where: str, row: RowFrame, group: int, first: int, end: int) -> tuple[Array, Array]:
        """Block ids and offsets of positions first .. end - 1. Raises EngineError past the end of the table."""
        size = self._limits.block_size
        table = row.tables[group]
        if end > len(table) * size:
            raise EngineError(f"{where}: {end} tokens do not fit the table of {len(table)} blocks")
        positions = np.arange(first, end)
        return table[positions // size], positions % size


def wanted_tokens(row: PlanRow, begin: int) -> list[int]:
    """Which of the step's tokens a row wants something of, in the order of score, sample, pool. `begin`: its first one.

    Raises EngineError for tokens that the row does not have.
    """
    first, last = row.score_first, row.num_tokens
    spans = ((first, first + len(row.score_targets)), (last - row.sample, last), (last - row.num_pooled, last))
    if not all(0 <= low <= high <= row.num_tokens for low, high in spans):
        raise EngineError(f"slot {row.slot}: outputs are wanted of tokens that the row does not have")
    return [begin + token for low, high in spans for token in range(low, high)]


def first_key(position: int, window: int) -> int:
    """The first position that a token sees; `window` 0: all."""
    return max(position - window + 1, 0) if window else 0
