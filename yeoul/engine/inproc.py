"""InprocClient: the EngineClient whose engine runs in a thread of this process.

Owns the thread, the streams of open requests, draining and closing. Must not know HTTP, nor what a step does. The event
loop is woken once per step, with everything that step has to tell.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from yeoul.engine.client import EngineInfo, EngineStats, RequestObserver
from yeoul.engine.loop import Engine, StepMessage
from yeoul.engine.stream import OutputIterator, OutputStream
from yeoul.errors import EngineDeadError, RequestError, ShuttingDownError
from yeoul.types import Request

log = logging.getLogger(__name__)

SWITCH_INTERVAL = 0.0005
"""Seconds. How long the event loop may hold the interpreter's lock before the engine's thread gets it back."""
IDLE_SECONDS = 1.0
"""An idle loop goes round this often, so that its health shows."""


class InprocClient:
    """See EngineClient. Takes the engine over: nobody else may call its `step` or `close` any more."""

    def __init__(self, engine: Engine, observer: RequestObserver | None = None) -> None:
        """Starts the engine's thread. May be made before there is an event loop."""
        self._engine = engine
        self._observer = observer
        self._streams: dict[str, OutputStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work = threading.Condition()
        self._stopping = False
        self._draining = False
        self._died = False
        self._all_finished: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="yeoul-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """What does not change while the engine runs."""
        return self._engine.info

    def stats(self) -> EngineStats:
        """A snapshot; never waits for the engine's thread."""
        alive = not self._died and self._thread.is_alive()
        return msgspec.structs.replace(self._engine.stats(), alive=alive)

    def check(self, request: Request) -> None:
        """Refuse what cannot be served. Raises what EngineClient.check lists."""
        if self._died:
            raise _dead()
        if self._draining or self._stopping:
            raise ShuttingDownError("the engine is shutting down", hint="send the request to another server")
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id} is in use", param="request_id")
        self._engine.check(request)

    def submit(self, request: Request) -> OutputIterator:
        """Check and queue a request; iterate its outputs. Raises what `check` raises."""
        # Set before the check: a loop that dies in between sees either this event loop or no request.
        self._loop = asyncio.get_running_loop()
        self.check(request)
        stream = OutputStream(request, self._engine.clock.now(), self._observer)
        self._streams[request.request_id] = stream
        self._engine.add(request)
        self._wake()
        return OutputIterator(stream, self._engine.abort)

    def abort(self, request_id: str) -> None:
        """End a request with ABORT. Unknown ids are ignored."""
        if request_id in self._streams:
            self._engine.abort(request_id)
            self._wake()

    async def drain(self, timeout: float) -> bool:
        """Refuse new work; wait for the running requests, and abort them after `timeout` seconds.

        True if nothing had to be aborted.
        """
        self._draining = True
        if await self._wait_until_finished(timeout):
            return True
        for request_id in list(self._streams):
            self.abort(request_id)
        await self._wait_until_finished(None)
        return False

    async def _wait_until_finished(self, timeout: float | None) -> bool:
        if not self._streams or self._died:
            return True
        self._all_finished = asyncio.Event()
        try:
            await asyncio.wait_for(self._all_finished.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Abort what runs, stop the thread, free the executor. Idempotent."""
        self._stopping = True
        self._wake()
        while self._thread.is_alive():
            # Joined in another thread: this loop must stay free to deliver the last outputs.
            await asyncio.to_thread(self._thread.join, IDLE_SECONDS)
        await asyncio.sleep(0)

    def _wake(self) -> None:
        with self._work:
            self._work.notify()

    def _deliver(self, message: StepMessage) -> None:
        """On the event loop: hand a step's outputs to their streams."""
        now = self._engine.clock.now()
        for request_id, at in message.first_scheduled:
            if request_id in self._streams:
                self._streams[request_id].scheduled(at)
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.put(output, now)
            if stream.finished:
                del self._streams[output.request_id]
        self._tell_if_finished()

    def _deliver_death(self, _: None) -> None:
        for stream in self._streams.values():
            stream.fail(_dead())
        self._streams.clear()
        self._tell_if_finished()

    def _tell_if_finished(self) -> None:
        if self._all_finished is not None and not self._streams:
            self._all_finished.set()

    def _run(self) -> None:
        """The engine's thread."""
        sys.setswitchinterval(SWITCH_INTERVAL)
        try:
            while not self._stopping:
                self._go_round()
            self._abort_all()
        except BaseException as error:
            log.critical("the engine's loop died", exc_info=error)
            self._died = True
            self._post(self._deliver_death, None)
        finally:
            self._engine.close()

    def _go_round(self) -> None:
        if self._engine.has_work:
            self._tell(self._engine.step())
            return
        self._engine.idle()
        with self._work:
            if not self._engine.has_work and not self._stopping:
                self._work.wait(IDLE_SECONDS)

    def _abort_all(self) -> None:
        for request_id in list(self._streams):
            self._engine.abort(request_id)
        while self._engine.has_work:
            self._tell(self._engine.step())

    def _tell(self, message: StepMessage) -> None:
        if message.outputs or message.first_scheduled:
            self._post(self._deliver, message)

    def _post(self, deliver: Callable[[Any], None], payload: object) -> None:
        """Wake the event loop, once. Where it is closed nobody listens any more: the open requests are aborted."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(deliver, payload)
        except RuntimeError:
            log.warning("the event loop is closed; %d open requests are aborted", len(self._streams))
            for request_id in list(self._streams):
                self._engine.abort(request_id)
            self._streams.clear()


def _dead() -> EngineDeadError:
    return EngineDeadError("the engine died", hint="restart it; its log says why")
