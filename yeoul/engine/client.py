"""EngineClient: how a server (or anything asynchronous) sees the engine. Owns the protocol and its plain data.

Nothing but serializable messages crosses it, so that the engine can live in another process. Must not know HTTP,
JSON or the scheduler. `engine/inproc.py` is the transport inside one process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from yeoul.types import Request, TokenOutput


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the engine runs."""

    model_name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    num_kv_tokens: int
    """Tokens that the smallest-capacity full KV pool can hold in total."""
    executor: str
    """One line: kernels, threads."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for /metrics, /health and /ready. Counters only grow. Histograms are in `observations`."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_used_blocks: int = 0
    kv_cached_blocks: int = 0
    """Not used, contents known to the prefix cache: free for whoever needs a block."""
    kv_total_blocks: int = 0
    kv_computed_slots: int = 0
    """Token slots of used blocks that hold a token's keys and values. The next three are what else they are for."""
    kv_partial_slots: int = 0
    """The rest of last blocks."""
    kv_reserved_slots: int = 0
    """Reserved for tokens that may still come."""
    kv_over_reserved_slots: int = 0
    """Reserved for tokens that can never come."""
    prompt_tokens: int = 0
    """Counter: prompt tokens, cached ones included (recomputation after preemption is not counted again)."""
    generation_tokens: int = 0
    preemptions: int = 0
    lost_tokens: int = 0
    """Counter: computed tokens that preemptions gave up."""
    swapped_tokens: int = 0
    """Counter: computed tokens that preemptions swapped out."""
    swap_used_bytes: int = 0
    forks: int = 0
    """Counter: sequences that began with the prompt of another of the same request."""
    prefix_cache_queries: int = 0
    """Counter: prompt tokens looked up in the prefix cache, once for each request."""
    prefix_cache_hits: int = 0
    """Counter: those of them that were found."""
    num_steps: int = 0
    step_sizes: tuple[int, ...] = ()
    """Counters: steps by their number of tokens, in the buckets of engine/step_sizes.py."""
    step_tokens: int = 0
    """Counter: tokens that steps computed, recomputation included."""
    finished: dict[str, int] = {}
    """Counter per finish reason (values of FinishReason), one per sequence."""
    last_step_age: float = 0.0
    """Seconds since the loop last went round (idle loops go round too)."""
    alive: bool = True


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request's times, for the histograms. Seconds; None where the event never came."""

    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str
    queue: float | None
    ttft: float | None
    prefill: float | None
    decode: float | None
    e2e: float
    max_tokens: int | None
    n: int
    max_output_tokens: int
    """Of the longest of the n sequences."""


class RequestObserver(Protocol):
    """Told of what /metrics counts, on the client's side, never inside a step."""

    def delivered(self, gap: float | None, num_tokens: int) -> None:
        """A sequence delivered `num_tokens`, `gap` seconds after its previous delivery (None: its first)."""
        ...

    def finished(self, times: RequestTimes) -> None:
        """All n sequences of a request finished."""
        ...


class EngineClient(Protocol):
    """The engine, seen from an event loop. All methods are called from that loop's thread."""

    @property
    def info(self) -> EngineInfo:
        """What does not change while the engine runs."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot; never blocks."""
        ...

    def check(self, request: Request) -> None:
        """Refuse at once what can never be served.

        Raises RequestError (token id out of range, empty prompt), ContextLengthError, CapacityError, ShuttingDownError,
        EngineDeadError.
        """
        ...

    def submit(self, request: Request) -> AsyncIterator[TokenOutput]:
        """Check the request and put it in the engine's inbox; iterate its outputs until all n sequences finished.

        The returned iterator has `aclose()`; closing it early aborts the request, whose blocks are free within one
        step. Raises what `check` raises, at once rather than at the first output. A request that ends with
        FinishReason.ERROR delivers that as its terminal output and does not raise.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request's sequences with FinishReason.ABORT. Unknown ids are ignored (it may just have finished)."""
        ...

    async def drain(self, timeout: float) -> bool:
        """Refuse new work and wait until running requests finished; after `timeout` seconds abort the rest.

        Returns True if nothing had to be aborted.
        """
        ...

    async def close(self) -> None:
        """Stop the loop and free the executor. Idempotent."""
        ...
