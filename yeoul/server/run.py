"""Running the server: uvicorn on a bound socket, and the shutdown. Owns signals and the order of draining; must not
know routes or how the engine works.

First SIGINT or SIGTERM: new work is refused with 503 and Retry-After, running requests finish within
`shutdown_timeout` (the rest is aborted, each with an error), the exit code is 0. Second one: the process ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn

from yeoul.engine.client import EngineClient
from yeoul.obs.metrics import Metrics
from yeoul.server.app import create_app
from yeoul.server.handlers import Handlers
from yeoul.server.limits import limited_protocol
from yeoul.server.listen import BACKLOG, address
from yeoul.server.options import ServerOptions
from yeoul.server.replies.reader import PLAIN, ReplyFormats
from yeoul.server.text_service import TextService

FLUSH_TIMEOUT = 2
"""Seconds for answers that are complete to reach their clients after the engine has drained."""

log = logging.getLogger("yeoul.server")


class DrainingServer(uvicorn.Server):
    """uvicorn's server with our shutdown. `serve` returns when it is over."""

    def __init__(self, config: uvicorn.Config, client: EngineClient, handlers: Handlers, timeout: float) -> None:
        super().__init__(config)
        self._client = client
        self._handlers = handlers
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._stopping = False
        self.on_started: Callable[[], None] | None = None
        """Called once, when requests are accepted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn: start to accept."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.on_started is not None:
            self.on_started()
        if self._stopping:
            self._start_draining()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came. uvicorn's own version would end the process with the signal instead of code 0."""
        if self._stopping:
            os._exit(128 + sig)
        self.stop()

    def stop(self) -> None:
        """Begin the shutdown, as the first signal does. May be called from any thread, more than once."""
        self._stopping = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        if self._drain_task is None:
            self._handlers.draining = True
            self._drain_task = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        log.info("shutting down: running requests have %g s", self._timeout)
        try:
            if not await self._client.drain(self._timeout):
                log.warning("some requests were aborted: they did not finish within %g s", self._timeout)
        finally:
            self.should_exit = True


def make_server(
    client: EngineClient,
    text: TextService,
    options: ServerOptions,
    metrics: Metrics | None = None,
    formats: ReplyFormats = PLAIN,
) -> DrainingServer:
    """The server over an engine client, not yet started. `metrics`, `formats`: see create_app."""
    app = create_app(client, text, options, metrics, formats)
    config = uvicorn.Config(
        app,
        http=limited_protocol(options),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=options.access_log,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        backlog=BACKLOG,
        timeout_keep_alive=options.keep_alive_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=FLUSH_TIMEOUT,
    )
    return DrainingServer(config, client, app.state.handlers, options.shutdown_timeout)


async def serve(
    listener: socket.socket,
    client: EngineClient,
    text: TextService,
    options: ServerOptions,
    metrics: Metrics | None = None,
    formats: ReplyFormats = PLAIN,
    *,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal, then drain, then close client, text service and socket.

    `listener`: from listen.bind. `on_ready` gets the server's URL once requests are accepted.
    """
    server = make_server(client, text, options, metrics, formats)
    if on_ready is not None:
        server.on_started = partial(on_ready, address(listener, tls=options.ssl_certfile is not None))
    try:
        await server.serve(sockets=[listener])
    finally:
        await client.close()
        text.close()
        listener.close()


def run(
    listener: socket.socket,
    client: EngineClient,
    text: TextService,
    options: ServerOptions,
    metrics: Metrics | None = None,
    formats: ReplyFormats = PLAIN,
    *,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """`serve` in an event loop of its own (uvloop where there is one). Returns the exit code, 0."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(listener, client, text, options, metrics, formats, on_ready=on_ready))
    return 0


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, or None for asyncio's own where uvloop does not exist."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
