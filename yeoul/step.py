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


class LogitRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a sequence's logits are edited before filters and draw. The edits act in the order of the fields.

    Values are float32; each edit is computed in float64 and rounded to float32.
    """

    repetition_penalty: float = 1.0
    """Of every token in prompt and output, once: positive logits are divided by it, others multiplied."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    """Of every generated token: logit -= presence + frequency x times generated."""
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added)."""
    end_ids: tuple[int, ...] = ()
    first_end: int = 0
    """`end_ids` are banned for tokens at positions below `first_end`."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is banned where the output ends with all before it."""
    allowed: tuple[int, ...] | None = None
    """None: all. Otherwise every other token is banned."""
    num_prompt_tokens: int = 0
    history: tuple[int, ...] = ()
    """Every token of the sequence that is known when its stay begins, where an edit depends on them. The slot adds what
    it samples."""


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
    num_score_logprobs: int = 0
    """How many likeliest tokens are reported with every scored one."""
    rules: LogitRules | None = None
    """None: the logits are sampled as they are."""


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
    mask: bytes = b""
    """Which tokens may be sampled, one bit for each id: 32-bit little-endian words, lowest bit first. Empty: all."""
    score_first: int = 0
    score_targets: tuple[int, ...] = ()
    """Target i is scored by the logits at position start + score_first + i: its log-probability is wanted."""
    num_pooled: int = 0
    """The hidden states (inputs of the logits) of the last `num_pooled` tokens are added to the slot's sum."""


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
        """Tokens of all rows."""
        return sum(row.num_tokens for row in self.rows)


class RowStatus(IntEnum):
    """How a row went."""

    OK = 0
    NAN = 1
    """The row's logits hold a NaN or no finite value: the sequence ends with an error."""
    ERROR = 2
    NOTHING_ALLOWED = 3
    """The logits are sound, but the rules ban every token."""


class RowResult(msgspec.Struct, frozen=True):
    """`token_ids`: what was sampled (empty for a row that does not sample)."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    status: RowStatus = RowStatus.OK
    scores: tuple[TokenLogprob, ...] = ()
    """Of `score_targets`, in their order."""
    pooled: bytes = b""
    """The slot's sum of hidden states since its stay began, float64 little-endian, where `num_pooled` is not 0."""


class StepResult(msgspec.Struct, frozen=True):
    """Rows in the plan's order. Times in seconds of the engine's clock, taken around the execution."""

    step_id: int
    rows: tuple[RowResult, ...]
    started_at: float
    finished_at: float
