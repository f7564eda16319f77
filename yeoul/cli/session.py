"""One engine in this thread, for commands that answer one user. Owns opening, driving and timing; must not print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from yeoul.config import EngineConfig
from yeoul.errors import EngineError
from yeoul.types import FinishReason, Request, TokenOutput

if TYPE_CHECKING:
    from yeoul.cli.terminal import Interrupt
    from yeoul.engine.loop import Engine


class Reply(msgspec.Struct, kw_only=True):
    """A finished reply and its times."""

    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    """The end token included."""
    ttft: float | None
    """Seconds from the request to its first token; None if there was none."""
    tokens_per_second: float | None
    """Of the tokens after the first; None for fewer than two."""


@contextmanager
def open_engine(config: EngineConfig) -> Iterator[Engine]:
    """The engine of a configuration, closed at the end. Raises what `build_engine` raises."""
    from yeoul.engine.build import build_engine

    engine = build_engine(config)
    try:
        yield engine
    finally:
        engine.close()


def reply_to(engine: Engine, request: Request, interrupt: Interrupt, show: Callable[[str], None]) -> Reply:
    """Run one request of one sequence and show its text as it comes; after Ctrl-C it ends with ABORT.

    Raises what `Engine.check` raises, and EngineError for a reply that failed.
    """
    started = engine.clock.now()
    first = last = None
    texts: list[str] = []
    reason, count = FinishReason.ABORT, 0
    for output in _run(engine, request, interrupt):
        now = engine.clock.now()
        if output.token_ids:
            first, last = first or now, now
        if output.text:
            texts.append(output.text)
            show(output.text)
        reason, count = output.finish_reason or reason, output.num_output_tokens
    return Reply(
        text="".join(texts),
        finish_reason=reason,
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=count,
        ttft=None if first is None else first - started,
        tokens_per_second=(count - 1) / (last - first) if first and last and last > first else None,
    )


def _run(engine: Engine, request: Request, interrupt: Interrupt) -> Iterator[TokenOutput]:
    engine.check(request)
    engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise EngineError(output.error or "the reply failed")
            yield output
        if interrupt.pressed and engine.has_work:
            engine.abort(request.request_id)
