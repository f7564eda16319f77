"""StepPlan and StepResult: the only words spoken between sched/ and exec/.

Plain, serializable data: a plan can be logged, replayed, sent to another process. Must not know the scheduler's
sequences or the executor's tensors; imports msgspec and types only.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from yeoul.types import TokenLogprob

NULL_BLOCK = 0
"""Block id 0 of every KV group: never allocated; padding and freed window blocks point at it."""


class SlotState(msgspec.Struct, frozen=True):
    """What the executor keeps for a sequence while it occupies a slot; sent with the first row of every stay.

    Sampling is a pure function of (logits, these values, position), so a sequence that is preempted and starts again
    continues with the same tokens.
    """

    seed: int
    """Unsigned 64-bit."""
    sequence_index: int
    """Which of the request's n sequences: the second part of the random counter."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    num_logprobs: int = -1
    """-1: none. 0: the chosen token's. k: also the k likeliest."""


class BlockCopy(msgspec.Struct, frozen=True):
    """Copy one block's keys and values, all layers of a KV group, to another block of the group."""

    group: int
    source: int
    target: int


class SwapOut(msgspec.Struct, frozen=True):
    """Keep a copy of these blocks, per KV group, under a handle; they belong to somebody else right after."""

    handle: int
    blocks: tuple[tuple[int, ...], ...]


class SwapIn(msgspec.Struct, frozen=True):
    """Bring what was kept under a handle back into these blocks, for the sequence in a slot, and forget the handle.

    As many blocks per group as went out, in the same order.
    """

    handle: int
    slot: int
    blocks: tuple[tuple[int, ...], ...]


class PlanRow(msgspec.Struct, frozen=True):
    """The part of one sequence that a step computes: positions start .. start + num_tokens - 1.

    `token_ids` holds the tokens at those positions. Empty means "from slot": the one token that the executor sampled
    last for this slot (then num_tokens is 1). `new_blocks`, one tuple per KV group, is appended to the slot's block
    tables; with `state` set (the first row of a stay) the tables are emptied first. A stay may begin at a position
    above 0: the KV before it is in the blocks already, or comes there by the plan's copies.
    """

    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    new_blocks: tuple[tuple[int, ...], ...]
    sample: bool
    """True when the last position's logits are wanted and the next token is sampled."""
    state: SlotState | None = None


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Before any row runs, in this order: slots are released, swaps dropped, blocks swapped out, copied and
    swapped in. A slot may be released and taken again in the same plan, and so may a block.

    A row whose swap-in fails has the status ERROR. Dropping a handle that is unknown does nothing.
    """

    step_id: int
    rows: tuple[PlanRow, ...]
    released_slots: tuple[int, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    dropped_swaps: tuple[int, ...] = ()
    swap_outs: tuple[SwapOut, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class RowStatus(IntEnum):
    OK = 0
    NAN = 1
    """The row's logits hold a NaN or no finite value: the sequence ends with an error."""
    ERROR = 2


class RowResult(msgspec.Struct, frozen=True):
    """`token_ids`: what was sampled (empty for a row that does not sample)."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    status: RowStatus = RowStatus.OK


class StepResult(msgspec.Struct, frozen=True):
    """Rows in the plan's order. Times in seconds of the engine's clock, taken around the execution."""

    step_id: int
    rows: tuple[RowResult, ...]
    started_at: float
    finished_at: float
