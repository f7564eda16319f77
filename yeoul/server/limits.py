"""Limits of the HTTP/1.1 connection that uvicorn's httptools protocol lacks. Owns times and sizes below ASGI; must not
know routes or bodies.

A connection has phases: HEAD (from its start, or from the first byte of a later request, until the headers are
complete), BODY (until the request is complete), IDLE. HEAD and BODY have one timer each; uvicorn's own keep-alive timer
covers IDLE. Independently, a stall timer runs while the client takes none of the bytes that are ready for it.

Pipelined requests are not served: the connection closes after the answer in progress. Reading therefore never pauses
while an answer is computed, which is what makes a client that leaves noticed at once.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from yeoul.server.errors import dump, error_object
from yeoul.server.options import ServerOptions


class Phase(Enum):
    """What the client owes."""

    HEAD = "head"
    BODY = "body"
    IDLE = "idle"


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with header limits and header, body and write timeouts. Use `limited_protocol(options)`."""

    options: ServerOptions

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._phase = Phase.HEAD
        self._timed_phase = Phase.IDLE
        self._phase_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._pending_bytes = 0
        self._head_bytes = 0
        """Raw bytes while the phase is HEAD."""
        self._counted_bytes = 0
        """Bytes of the request line and the header fields that the parser reported."""
        self._head_limit_broken = False
        self._deaf = False
        """True once nothing more is parsed: the rest of what the client sends is thrown away."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio: a client connected."""
        super().connection_made(transport)
        # Any byte that the kernel does not take pauses writing, so that a stalled reader shows at once. A TLS transport
        # pauses at its limit, not above it: with 0 it would never go on.
        transport.set_write_buffer_limits(high=0 if transport.get_extra_info("sslcontext") is None else 1)
        self._time_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection is gone."""
        self._deaf = True
        self._cancel_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        if self._deaf:
            return
        if self._phase is Phase.IDLE and not self._answering():
            self._phase = Phase.HEAD
        if self._phase is Phase.HEAD:
            self._head_bytes += len(data)
        super().data_received(data)
        self._check_head()
        self._time_phase()
        self._restore_keep_alive()

    def on_message_begin(self) -> None:
        """Parser: a request starts."""
        if self._answering():
            self._close_after_answer()
            return
        self._phase = Phase.HEAD
        self._counted_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Parser: (a part of) the request's target."""
        if not self._deaf:
            self._counted_bytes += len(url)
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser: one complete header field."""
        if self._deaf:
            return
        self._counted_bytes += len(name) + len(value) + len(": \r\n")
        if self._counted_bytes > self.options.max_header_bytes or len(self.headers) >= self.options.max_header_fields:
            self._head_limit_broken = True
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Parser: the headers are complete; starts the ASGI task."""
        if self._deaf:
            return
        self._phase = Phase.BODY
        if not self._head_limit_broken:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Parser: a part of the body."""
        if not self._deaf and not self._head_limit_broken:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Parser: the request is complete."""
        if self._deaf or self._head_limit_broken:
            return
        self._phase = Phase.IDLE
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn: the bytes are not HTTP."""
        self._refuse(HTTPStatus.BAD_REQUEST, "the bytes sent are not a valid HTTP/1.1 request", "bad_http")

    def pause_writing(self) -> None:
        """asyncio: bytes wait for the client."""
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        """asyncio: the client took them all."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_after_answer(self) -> None:
        self._deaf = True
        self.cycle.keep_alive = False

    def _check_head(self) -> None:
        """A header field without an end stays inside the parser, so the raw count decides while the phase is HEAD."""
        endless = self._phase is Phase.HEAD and self._head_bytes > self.options.max_header_bytes
        if endless or self._head_limit_broken:
            self._refuse_head()
        elif self._phase is not Phase.HEAD:
            self._head_bytes = 0

    def _refuse_head(self) -> None:
        options = self.options
        limits = f"{options.max_header_bytes} bytes or {options.max_header_fields} fields"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the headers are over {limits}", "headers_too_large")

    def _refuse(self, status: HTTPStatus, message: str, code: str) -> None:
        """Answer without ASGI and close. Where an answer is already in progress, only close after it."""
        if self._deaf:
            return
        if self._answering() and self.cycle.response_started:
            self._close_after_answer()
            return
        self._deaf = True
        body = dump(error_object(message, code=code))
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if self._answering():  # the task that waits for the rest of the body must not answer as well
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()

    def _time_phase(self) -> None:
        """Start the timer of a phase that has just begun; a phase that goes on keeps the timer it has."""
        phase = Phase.IDLE if self._deaf else self._phase
        if phase is self._timed_phase:
            return
        self._timed_phase = phase
        if self._phase_timer is not None:
            self._phase_timer.cancel()
            self._phase_timer = None
        if phase is Phase.HEAD:
            self._phase_timer = self.loop.call_later(self.options.header_timeout, self._head_too_slow)
        elif phase is Phase.BODY:
            self._phase_timer = self.loop.call_later(self.options.body_timeout, self._body_too_slow)

    def _restore_keep_alive(self) -> None:
        """uvicorn drops its keep-alive timer at every byte; bytes that begin no request must not hold a connection."""
        if self._phase is Phase.IDLE and not self._answering() and not self._deaf and not self.timeout_keep_alive_task:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _head_too_slow(self) -> None:
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the headers took too long to arrive", "header_timeout")

    def _body_too_slow(self) -> None:
        if self._answering():
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the body took too long to arrive", "body_timeout")
        else:
            self.transport.abort()

    def _watch_stall(self) -> None:
        self._pending_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.options.write_timeout, self._check_stall)

    def _check_stall(self) -> None:
        """While writing is paused nothing is added, so fewer pending bytes means that the client reads."""
        if self.transport.get_write_buffer_size() < self._pending_bytes:
            self._watch_stall()
        else:
            self.transport.abort()

    def _cancel_timers(self) -> None:
        for timer in (self._phase_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()


def limited_protocol(options: ServerOptions) -> type[LimitedProtocol]:
    """The protocol class with these limits, for uvicorn's `Config(http=...)`."""
    return type("LimitedProtocol", (LimitedProtocol,), {"options": options})
