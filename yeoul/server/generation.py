"""One HTTP call's requests in the engine: submit them all or none, merge their outputs, abort them. Owns the mapping
from (prompt, sequence) to choice index; must not know JSON or HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from yeoul.engine.client import EngineClient
from yeoul.errors import ShuttingDownError
from yeoul.server.errors import ClientDisconnectedError, GenerationError
from yeoul.server.wire.call import Usage
from yeoul.types import FinishReason, Request, TokenOutput

Receive = Callable[[], Awaitable[Any]]
T = TypeVar("T")


class Choice:
    """An output with its place in the answer: choices are prompt-major, `index` = prompt x n + sequence."""

    __slots__ = ("index", "output")

    def __init__(self, index: int, output: TokenOutput) -> None:
        self.index = index
        self.output = output


_Item = tuple[int, Choice] | Exception | None
"""What a pump delivers: an output with its request's index, why the request failed, or that it ended."""


class _OutputStream(Protocol):
    """What EngineClient.submit returns: an iterator that can be closed early."""

    def __aiter__(self) -> AsyncIterator[TokenOutput]: ...

    async def aclose(self) -> None: ...


class Generation:
    """The running requests of one call. `outputs` may be iterated once; `aclose` must always be called.

    The constructor refuses the whole call, with nothing submitted, if any of its requests is refused.
    Raises what EngineClient.check raises.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._requests = list(requests)
        self._streams: list[_OutputStream] = []
        self._pumps: list[asyncio.Task[None]] = []
        self.usage = Usage(prompt_tokens=sum(len(request.prompt_token_ids) for request in requests))
        for request in self._requests:
            client.check(request)
        try:
            for request in self._requests:
                self._streams.append(cast(_OutputStream, client.submit(request)))
        except BaseException:
            self._abort()
            raise

    async def outputs(self) -> AsyncGenerator[Choice, None]:
        """Every output of every request as it comes.

        Raises GenerationError where a sequence ends with an error, ShuttingDownError where it is aborted by the server.
        """
        source = self._single() if len(self._streams) == 1 else self._merged()
        cached: dict[int, int] = {}
        generated: dict[int, int] = {}
        async for request_index, choice in source:
            output = choice.output
            self.usage.completion_tokens += output.num_output_tokens - generated.get(choice.index, 0)
            generated[choice.index] = output.num_output_tokens
            if output.finish_reason is not None:
                _check_end(output)
                cached[request_index] = max(cached.get(request_index, 0), output.num_cached_tokens)
                self.usage.cached_tokens = sum(cached.values())
                self.usage.times = output.times or self.usage.times
            yield choice

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent; cheap when everything finished."""
        self._abort()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.aclose()

    def _abort(self) -> None:
        """Tell the engine at once; it ignores requests that have finished."""
        for request in self._requests[: len(self._streams)]:
            self._client.abort(request.request_id)

    async def _single(self) -> AsyncIterator[tuple[int, Choice]]:
        async for output in self._streams[0]:
            yield 0, Choice(output.index, output)

    async def _merged(self) -> AsyncIterator[tuple[int, Choice]]:
        """Outputs of several requests in the order in which they arrive."""
        queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._pumps = [asyncio.create_task(self._pump(index, queue)) for index in range(len(self._streams))]
        running = len(self._pumps)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item

    async def _pump(self, index: int, queue: asyncio.Queue[_Item]) -> None:
        first_choice = sum(request.params.n for request in self._requests[:index])
        try:
            async for output in self._streams[index]:
                queue.put_nowait((index, Choice(first_choice + output.index, output)))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)


def _check_end(output: TokenOutput) -> None:
    if output.finish_reason is FinishReason.ERROR:
        raise GenerationError(output.error or "the request failed in the engine")
    if output.finish_reason is FinishReason.ABORT:
        raise ShuttingDownError("the request was aborted because the server is shutting down")


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it and raise ClientDisconnectedError as soon as the client is gone.

    The request's body must have been read.
    """
    main = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((main, watcher), return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            return main.result()
        raise ClientDisconnectedError
    finally:
        for task in (main, watcher):
            task.cancel()
        await asyncio.gather(main, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
