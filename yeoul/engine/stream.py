"""OutputStream: one request's outputs on the event loop, and the times they came at.

Owns the queue between engine and client and the arithmetic of RequestTimes. Must not know the engine's thread; it is
told what happened and when. Used from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from yeoul.engine.client import RequestObserver, RequestTimes
from yeoul.errors import EngineDeadError
from yeoul.types import FinishReason, Request, TokenOutput


class OutputStream:
    """The engine's end: `put` until `finished`; `get` for one reader."""

    def __init__(self, request: Request, arrived_at: float, observer: RequestObserver | None) -> None:
        self.request = request
        self._arrived_at = arrived_at
        self._observer = observer
        self._queue: deque[TokenOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._num_open = request.params.n
        self._closed = False
        self._error: EngineDeadError | None = None
        self._scheduled_at: float | None = None
        self._first_at: float | None = None
        self._last_at: float | None = None
        self._last_by_index: dict[int, float] = {}
        self._num_output_tokens = 0
        self._max_output_tokens = 0

    @property
    def finished(self) -> bool:
        """All terminal outputs have been put in, whether or not they were taken out."""
        return self._num_open == 0

    @property
    def is_over(self) -> bool:
        """Nothing will be put in any more."""
        return self.finished or self._error is not None

    async def get(self) -> TokenOutput | None:
        """The next output; None after the last. Raises EngineDeadError if the engine died before the last."""
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._closed or self.finished:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._queue.popleft()

    def close(self) -> None:
        """Nobody reads any more: what is queued and what still comes is dropped. Idempotent."""
        self._closed = True
        self._queue.clear()
        self._wake()

    def scheduled(self, at: float) -> None:
        """The request's first sequence started."""
        self._scheduled_at = at

    def put(self, output: TokenOutput, now: float) -> None:
        """An output arrived."""
        if output.token_ids:
            self._count_delivery(output, now)
        if output.finish_reason is not None:
            self._num_open -= 1
            self._num_output_tokens += output.num_output_tokens
            self._max_output_tokens = max(self._max_output_tokens, output.num_output_tokens)
            if self.finished and self._observer is not None:
                self._observer.finished(self._times(output.finish_reason, now))
        if not self._closed:
            self._queue.append(output)
            self._wake()

    def fail(self, error: EngineDeadError) -> None:
        """No more outputs will come."""
        self._error = error
        self._wake()

    def _count_delivery(self, output: TokenOutput, now: float) -> None:
        previous = self._last_by_index.get(output.index)
        self._last_by_index[output.index] = self._last_at = now
        if self._first_at is None:
            self._first_at = now
        if self._observer is not None:
            self._observer.delivered(None if previous is None else now - previous, len(output.token_ids))

    def _times(self, reason: FinishReason, now: float) -> RequestTimes:
        params = self.request.params
        return RequestTimes(
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=self._num_output_tokens,
            finish_reason=reason,
            queue=_gap(self._arrived_at, self._scheduled_at),
            ttft=_gap(self._arrived_at, self._first_at),
            prefill=_gap(self._scheduled_at, self._first_at),
            decode=_gap(self._first_at, self._last_at),
            e2e=now - self._arrived_at,
            max_tokens=params.max_tokens,
            n=params.n,
            max_output_tokens=self._max_output_tokens,
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class OutputIterator(AsyncIterator[TokenOutput]):
    """The client's end. Ends after the terminal outputs of all n sequences; `aclose` before that aborts the request."""

    def __init__(self, stream: OutputStream, abort: Callable[[str], None]) -> None:
        """`abort` gets the request id; it is called from a finalizer too, so it must not block."""
        self._stream = stream
        self._abort = abort
        self._closed = False

    def __aiter__(self) -> OutputIterator:
        return self

    async def __anext__(self) -> TokenOutput:
        """The next output. Raises EngineDeadError if the engine died before this request finished."""
        output = await self._stream.get()
        if output is None:
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        """Stop iterating; a request that has not finished is aborted. Idempotent."""
        self._close()

    def __del__(self) -> None:
        # For a client that drops the iterator without closing it. Only appends to the engine's inbox: no lock is taken.
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._stream.is_over:
            self._abort(self._stream.request.request_id)
        self._stream.close()


def _gap(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
