"""Server-sent events. Owns the stream's HTTP life: its start, an error in the middle, the end, a client that leaves.
Must not know OpenAI's shapes.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from yeoul.errors import YeoulError
from yeoul.server.errors import describe, internal_error
from yeoul.server.generation import Choice, Generation, unless_disconnected
from yeoul.server.wire.call import Usage

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

log = logging.getLogger("yeoul.server")


class StreamWriter(Protocol):
    """What turns outputs into server-sent events: Answer, ResponseAnswer."""

    def chunk(self, choice: Choice, usage: Usage) -> bytes:
        """The events of one output; may be empty. `usage`: so far."""
        ...

    def tail(self, usage: Usage) -> bytes:
        """What ends the stream."""
        ...

    def failure(self, body: dict[str, Any]) -> bytes:
        """What ends the stream instead, after an error. `body`: OpenAI's error object."""
        ...


class EventStream(Response):
    """Streams an answer. Nothing is sent before the first output, so a request that fails at once gets its true HTTP
    status; an error after that is an event of its own, and the stream ends without [DONE].

    The generation is closed, which aborts what still runs, however the stream ends.
    """

    def __init__(self, generation: Generation, answer: StreamWriter, request_id: str) -> None:
        super().__init__()
        self._generation = generation
        self._answer = answer
        self._request_id = request_id
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        try:
            await unless_disconnected(receive, self._run(send))
        finally:
            await self._generation.aclose()

    async def _run(self, send: Send) -> None:
        try:
            async with aclosing(self._generation.outputs()) as outputs:
                async for choice in outputs:
                    if chunk := self._answer.chunk(choice, self._generation.usage):
                        await self._send(send, chunk)
            last = self._answer.tail(self._generation.usage)
        except Exception as error:
            if not self._started:
                raise
            last = self._answer.failure(self._error_object(error))
        await self._send(send, last, more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": data, "more_body": more})

    def _error_object(self, error: Exception) -> dict[str, Any]:
        if isinstance(error, YeoulError):
            log.warning("request %s failed while streaming: %s", self._request_id, error)
            return describe(error, self._request_id)
        log.error("request %s failed while streaming", self._request_id, exc_info=error)
        return internal_error(self._request_id)
