"""Latency of one engine without traffic: prompt speed, TTFT, and decoding at fixed numbers of rows.

Owns what is measured and how it is summed up. Must not print or parse. A figure is the median of repeats after a
warm-up of its own, with the least and the greatest; nothing is averaged over repeats.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from yeoul.errors import EngineError
from yeoul.lab.meter import Spread, spread
from yeoul.types import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from yeoul.cli.terminal import Interrupt
    from yeoul.engine.loop import Engine
    from yeoul.ops.cost import Cost

CostOf = Callable[[int, int], "Cost"]
"""(rows, context) -> the work of one decode step."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is run. Lengths in tokens."""

    prompt_tokens: int
    """Of the prompt whose speed and TTFT are measured."""
    context_tokens: int
    """Of each row's prompt before decoding starts."""
    decode_tokens: int
    """That each row generates."""
    batches: tuple[int, ...]
    """Rows that decode together."""
    repeats: int


class PromptLatency(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt alone, until its first token."""

    tokens: int
    ttft: Spread
    """Seconds."""
    tokens_per_second: Spread


class DecodeLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in which `batch` rows gain one token each. Bytes: the file's weights, and the KV, as `ops/cost` counts."""

    batch: int
    step: Spread
    """Seconds; for one row this is TPOT."""
    tokens_per_second: Spread
    """Of all rows together."""
    weight_bytes_per_token: int
    kv_bytes_per_token: int
    """Read and written, at the middle of the run."""
    gigabytes_per_second: Spread
    """10^9 bytes of weights and KV per second."""


def _nothing() -> None:
    """Nothing is probed."""


def measure(
    engine: Engine,
    workload: Workload,
    cost_of: CostOf,
    progress: Callable[[int, int], None],
    interrupt: Interrupt,
    probe: Callable[[], None] = _nothing,
) -> tuple[PromptLatency, list[DecodeLatency]]:
    """Run a workload. `probe` is called after every run, so that what it measures lies between the samples.

    Raises what `Engine.check` raises, EngineError for a step that failed, and KeyboardInterrupt, between two steps,
    after Ctrl-C.
    """
    total = (1 + len(workload.batches)) * (1 + workload.repeats)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, total)
        probe()

    runner = _Runner(engine, interrupt)
    return _prompt(runner, workload, tick), [_decode(runner, workload, n, cost_of, tick) for n in workload.batches]


def _prompt(runner: _Runner, workload: Workload, tick: Callable[[], None]) -> PromptLatency:
    length = workload.prompt_tokens
    ttfts = _repeat(lambda: runner.first_token(length), workload.repeats, tick)
    speeds = [length / ttft for ttft in ttfts]
    return PromptLatency(tokens=length, ttft=spread(ttfts), tokens_per_second=spread(speeds))


def _decode(
    runner: _Runner, workload: Workload, batch: int, cost_of: CostOf, tick: Callable[[], None]
) -> DecodeLatency:
    steps = _repeat(
        lambda: runner.decode_step(batch, workload.context_tokens, workload.decode_tokens), workload.repeats, tick
    )
    cost = cost_of(batch, workload.context_tokens + workload.decode_tokens // 2)
    kv_bytes = cost.kv_read_bytes + cost.kv_write_bytes
    return DecodeLatency(
        batch=batch,
        step=spread(steps),
        tokens_per_second=spread([batch / step for step in steps]),
        weight_bytes_per_token=cost.weight_bytes // batch,
        kv_bytes_per_token=kv_bytes // batch,
        gigabytes_per_second=spread([(cost.weight_bytes + kv_bytes) / step / 1e9 for step in steps]),
    )


def _repeat(run: Callable[[], float], repeats: int, tick: Callable[[], None]) -> list[float]:
    """Results of `run` after one that is thrown away."""
    results = []
    for _ in range(1 + repeats):
        results.append(run())
        tick()
    return results[1:]


class _Runner:
    """Drives the engine with random prompts, of which no two are alike."""

    def __init__(self, engine: Engine, interrupt: Interrupt) -> None:
        self._engine = engine
        self._interrupt = interrupt
        self._random = random.Random(0)
        self._count = 0

    def first_token(self, prompt_tokens: int) -> float:
        """Seconds from a request to its first token."""
        started = self._engine.clock.now()
        delivered = list(self._run([self._request(prompt_tokens, 1)]))
        return delivered[0][0] - started

    def decode_step(self, batch: int, context_tokens: int, decode_tokens: int) -> float:
        """Seconds of a step in which all rows decode: the mean over the steps of one run."""
        requests = [self._request(context_tokens, decode_tokens) for _ in range(batch)]
        full = [at for at, gained in self._run(requests) if gained == batch]
        if len(full) < 2:
            raise EngineError(f"{batch} rows never decoded together", hint="give a larger --kv-cache-memory")
        return (full[-1] - full[0]) / (len(full) - 1)

    def _request(self, prompt_tokens: int, max_tokens: int) -> Request:
        self._count += 1
        token_ids = [self._random.randrange(self._engine.info.vocab_size) for _ in range(prompt_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return Request(request_id=f"bench-{self._count}", prompt_token_ids=token_ids, params=params)

    def _run(self, requests: Sequence[Request]) -> Iterator[tuple[float, int]]:
        """(time, tokens gained) of every step that gained any."""
        engine = self._engine
        for request in requests:
            engine.check(request)
        for request in requests:
            engine.add(request)
        while engine.has_work:
            if self._interrupt.pressed:
                raise KeyboardInterrupt
            outputs = engine.step().outputs
            for output in outputs:
                if output.finish_reason is FinishReason.ERROR:
                    raise EngineError(output.error or "a step failed")
            if gained := sum(len(output.token_ids) for output in outputs):
                yield engine.clock.now(), gained
