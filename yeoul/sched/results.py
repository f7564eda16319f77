"""What the scheduler tells the engine: gains, losses and counts. Plain data; must not know how they came about."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from yeoul.sched.sequence import Sequence
from yeoul.step import RowStatus
from yeoul.types import FinishReason, TokenLogprob

ROW_ERRORS: Mapping[RowStatus, str] = MappingProxyType(
    {
        RowStatus.NAN: "the model's output for this sequence is not a number",
        RowStatus.ERROR: "computing this sequence failed",
        RowStatus.NOTHING_ALLOWED: "the request's bans leave no token to generate",
    }
)
"""What a client is told of a row that failed."""


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
    """A sequence that went back to the queue, the one that needed its blocks, and what that cost."""

    sequence: Sequence
    needed_by: Sequence
    """Itself, if nobody who ranks lower held any."""
    num_lost_tokens: int
    """Computed tokens whose KV was given up; 0 if it was swapped out. Some may be found in the prefix cache again."""
    num_swapped_tokens: int
    """Computed tokens whose KV was swapped out."""


class SchedulerCounters(msgspec.Struct):
    """Only grow."""

    prompt_tokens: int = 0
    """Computed or found for the first time, of the first of n sequences: the sum of the prompts' lengths."""
    generation_tokens: int = 0
    preemptions: int = 0
    lost_tokens: int = 0
    """Computed tokens that preemptions gave up."""
    swapped_tokens: int = 0
    """Computed tokens that preemptions swapped out."""
    forks: int = 0
    """Stays that began with another sequence's prompt."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up: once for each request, when its first sequence starts for the first time."""
    prefix_cache_hits: int = 0
    """Those of them that were found. What a preempted sequence finds of its own is no hit."""
