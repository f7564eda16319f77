"""Sequence: one sampled continuation of a request, as the scheduler keeps it.

Owns the counters and the rules that need nothing else (how the seed and the filters become a SlotState). Must not know
blocks' ids, the executor or text.
"""

from __future__ import annotations

from enum import Enum

from yeoul.kv.swap import Swapped
from yeoul.kv.tables import BlockTables
from yeoul.step import LogitRules, SlotState
from yeoul.types import FinishReason, Pooling, Request, TokenLogprob

NO_SLOT = -1
NO_LIMIT = 2**63 - 1


class SequenceStatus(Enum):
    """WAITING: in the queue, holds nothing. RUNNING: has a slot. FINISHED: for good."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens known and tokens computed; a step closes the gap between them. There are no phases.

    `num_scheduled_tokens` are in flight: planned and not yet committed. Only the scheduler changes a sequence.
    """

    __slots__ = (
        "arrived_at",
        "finish_reason",
        "first_scheduled_at",
        "id",
        "in_slot",
        "index",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_counted_tokens",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "prompt_scores",
        "request",
        "sampled_in_slot",
        "seed",
        "siblings",
        "slot",
        "status",
        "swapped",
        "tables",
        "token_ids",
    )

    tables: BlockTables
    """Set by Scheduler.add."""

    def __init__(self, request: Request, index: int, seed: int, sequence_id: int, arrived_at: float) -> None:
        """`sequence_id` ascends with arrival over the whole engine; `seed` is any integer, taken modulo 2^64."""
        self.request = request
        self.index = index
        self.id = sequence_id
        self.seed = seed % 2**64
        self.siblings = [self]
        """The request's n sequences by index, this one included; set by who makes them."""
        self.arrived_at = arrived_at
        self.first_scheduled_at: float | None = None
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens = NO_LIMIT if request.params.max_tokens is None else request.params.max_tokens
        """Clamped by the scheduler to what the context and the pool allow."""
        self.num_cached_tokens = 0
        """Prompt tokens that were in the prefix cache when the sequence started for the first time."""
        self.num_computed_tokens = 0
        """Tokens whose KV exists: computed in this stay, or shared with who computed them."""
        self.num_scheduled_tokens = 0
        self.num_counted_tokens = 0
        """The highest num_computed_tokens ever reached: recomputed tokens are not counted twice."""
        self.prompt_scores: list[TokenLogprob] = []
        """Of the prompt's tokens after the first, as far as they are known."""
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.swapped: Swapped | None = None
        """What a preempted sequence has of its tokens outside the pools."""
        self.slot = NO_SLOT
        self.in_slot = False
        """The executor knows of this stay: the first row, with the SlotState, has been planned."""
        self.sampled_in_slot = False
        """The last known token was sampled in this stay, so that the executor has it."""

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, an end token included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_prompt(self) -> bool:
        """Whether something is wanted of the prompt's own positions: then all of them must be computed in this stay."""
        return self.request.params.prompt_logprobs is not None or self.request.pooling is not None

    @property
    def only_prompt(self) -> bool:
        """Nothing is generated: the sequence ends when its prompt is computed."""
        return self.max_tokens == 0

    def score_span(self, start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Of a row's positions start .. end - 1: the first to score, relative to start, and the targets from there on.

        What was scored before a preemption is not scored again.
        """
        if self.request.params.prompt_logprobs is None:
            return 0, ()
        first = max(start, len(self.prompt_scores))
        targets = tuple(self.token_ids[first + 1 : min(end + 1, self.num_prompt_tokens)])
        return (first - start, targets) if targets else (0, ())

    def num_pooled(self, start: int, end: int) -> int:
        """How many of a row's last tokens are pooled."""
        if self.request.pooling is None:
            return 0
        return end - start if self.request.pooling is Pooling.MEAN else int(end == self.num_prompt_tokens)

    def ends_with(self, token_id: int, end_tokens: frozenset[int]) -> bool:
        """Whether a sampled token ends the output. Where min_tokens forbids that, no such token is sampled."""
        params = self.request.params
        return token_id in params.stop_token_ids or (token_id in end_tokens and not params.ignore_eos)

    def slot_state(self, end_tokens: frozenset[int] = frozenset()) -> SlotState:
        """What the executor needs to sample for this sequence. The seed is the request's; the index tells n apart."""
        params = self.request.params
        return SlotState(
            seed=self.seed,
            sequence_index=self.index,
            temperature=float(params.temperature),
            top_p=float(params.top_p),
            top_k=max(params.top_k, 0),
            min_p=float(params.min_p),
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            num_score_logprobs=params.prompt_logprobs or 0,
            rules=self._rules(end_tokens) if params.edits_logits else None,
        )

    def _rules(self, end_tokens: frozenset[int]) -> LogitRules:
        """The history goes along, so that a sequence that was preempted continues as if it had not been."""
        params = self.request.params
        penalized = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1
        ends = (end_tokens if not params.ignore_eos else frozenset()) | frozenset(params.stop_token_ids)
        return LogitRules(
            repetition_penalty=float(params.repetition_penalty),
            frequency_penalty=float(params.frequency_penalty),
            presence_penalty=float(params.presence_penalty),
            bias=tuple((token_id, float(bias)) for token_id, bias in params.logit_bias.items()),
            end_ids=tuple(sorted(ends)) if params.min_tokens else (),
            first_end=self.num_prompt_tokens + params.min_tokens,
            bad_words=self.request.bad_word_ids,
            allowed=params.allowed_token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            history=tuple(self.token_ids) if penalized or params.bad_words else (),
        )

    def leave_slot(self) -> None:
        """Forget the stay: what was computed is gone with its blocks."""
        self.slot = NO_SLOT
        self.in_slot = False
        self.sampled_in_slot = False
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
