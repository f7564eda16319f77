"""Throughput of one engine: all prompts at once, as fast as it can.

Owns what is measured and how it is summed up. Must not print or parse. Figures are medians of repeats after a warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import msgspec

from yeoul.errors import EngineError
from yeoul.lab.meter import Spread, spread
from yeoul.lab.workload import Lengths
from yeoul.types import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from yeoul.engine.loop import Engine


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What is run."""

    prompts: int
    input_tokens: Lengths
    output_tokens: Lengths
    repeats: int
    seed: int = 0


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run of all prompts, from the first step to the last."""

    prompt_tokens: int
    output_tokens: int
    seconds: Spread
    prompt_tokens_per_second: Spread
    output_tokens_per_second: Spread
    total_tokens_per_second: Spread


def measure(
    engine: Engine, batch: Batch, progress: Callable[[int, int], None], interrupted: Callable[[], bool]
) -> Throughput:
    """Run a batch `repeats` times after a warm-up; every run has the same lengths and prompts of its own.

    Raises what `Engine.check` raises, EngineError for a step that failed, and KeyboardInterrupt, between two steps,
    when `interrupted` says so.
    """
    random = Random(batch.seed)
    lengths = [(batch.input_tokens.pick(random), batch.output_tokens.pick(random)) for _ in range(batch.prompts)]
    seconds = []
    for run in range(1 + batch.repeats):
        seconds.append(_run(engine, _requests(run, lengths, engine.info.vocab_size, random), interrupted))
        progress(run + 1, 1 + batch.repeats)
    prompt_tokens, output_tokens = (sum(column) for column in zip(*lengths, strict=True))
    measured = seconds[1:]
    return Throughput(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        seconds=spread(measured),
        prompt_tokens_per_second=spread([prompt_tokens / s for s in measured]),
        output_tokens_per_second=spread([output_tokens / s for s in measured]),
        total_tokens_per_second=spread([(prompt_tokens + output_tokens) / s for s in measured]),
    )


def _requests(run: int, lengths: list[tuple[int, int]], vocab_size: int, random: Random) -> list[Request]:
    requests = []
    for i, (input_tokens, output_tokens) in enumerate(lengths):
        token_ids = [random.randrange(vocab_size) for _ in range(input_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        requests.append(Request(request_id=f"bench-{run}-{i}", prompt_token_ids=token_ids, params=params))
    return requests


def _run(engine: Engine, requests: list[Request], interrupted: Callable[[], bool]) -> float:
    """Seconds until all are answered."""
    for request in requests:
        engine.check(request)
    started = engine.clock.now()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        if interrupted():
            raise KeyboardInterrupt
        for output in engine.step().outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise EngineError(output.error or "a step failed")
    return engine.clock.now() - started
