"""A client of any OpenAI-compatible server that costs little per piece: asyncio's protocols and httptools.

Owns the request's body, HTTP and server-sent events, and when each piece arrived. Must not know what times mean
(`meter`) or when requests are due (`load`). Every request has a connection of its own, as part of its latency.
Nothing that a server sends can take more memory than the limits below.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from yeoul.errors import ConfigError
from yeoul.lab.meter import Record
from yeoul.lab.workload import Item

Clock = Callable[[], float]
MAX_EVENT_BYTES = 1 << 20
MAX_ERROR_BYTES = 1 << 16
MAX_ERROR_TEXT = 200


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go and what they all say."""

    host: str
    port: int
    tls: bool
    path: str
    """Of the API, e.g. /v1."""
    model: str
    endpoint: str = "completions"
    ignore_eos: bool = True
    """Ask for the full length with a field that OpenAI's API does not have but most servers take."""
    api_key: str | None = None
    timeout: float = 600.0
    """Seconds for one request."""

    def request(self, item: Item) -> bytes:
        """The whole HTTP request."""
        chat = self.endpoint == "chat"
        body = msgspec.json.encode(self._body(item, chat))
        lines = [
            f"POST {self.path}/{'chat/completions' if chat else 'completions'} HTTP/1.1",
            f"Host: {f'[{self.host}]' if ':' in self.host else self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Accept: text/event-stream",
            "Connection: close",
            *([f"Authorization: Bearer {self.api_key}"] if self.api_key else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    def _body(self, item: Item, chat: bool) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": item.prompt}]} if chat else {"prompt": item.prompt}
        common = {
            "model": self.model,
            "max_tokens": item.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return asked | common | ({"ignore_eos": True} if self.ignore_eos else {})


def parse_base_url(url: str) -> tuple[str, int, bool, str]:
    """(host, port, tls, path) of `http://host:port` (then the path is /v1) or `http://host:port/path`.

    Raises ConfigError.
    """
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    plain = url.isascii() and url.strip().isprintable() and " " not in url.strip()
    odd = parts.query or parts.fragment or parts.username is not None
    if parts.scheme not in ("http", "https") or not parts.hostname or odd or not plain:
        raise ConfigError(f"{url!r} is no URL of a server", hint="such as http://127.0.0.1:8000/v1")
    tls = parts.scheme == "https"
    return parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/") or "/v1"


def check_api_key(key: str) -> str:
    """The key without surrounding space. Raises ConfigError for one that no header can carry."""
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError("the API key must be one line of printable ASCII characters")
    return key


def tls_context(target: Target) -> ssl.SSLContext | None:
    """What all of a run's connections share: making it takes many milliseconds. None without TLS."""
    return ssl.create_default_context() if target.tls else None


async def exchange(
    target: Target, item: Item, due: float, context: ssl.SSLContext | None, clock: Clock = time.perf_counter
) -> Record:
    """Send one request and follow its reply to the end. What goes wrong is in the record.

    `due`: on the clock. `context`: of `tls_context`. Raises ValueError for a target with TLS and no context.
    """
    if target.tls != (context is not None):
        raise ValueError("a target with TLS needs a context, one without must not have one")
    seen = _Exchange(target.request(item), clock)
    loop = asyncio.get_running_loop()
    transport = None
    try:
        async with asyncio.timeout(target.timeout):
            transport, _ = await loop.create_connection(lambda: seen, target.host, target.port, ssl=context)
            await seen.done.wait()
    except TimeoutError:
        seen.fail("timed out")
    except OSError as error:
        seen.fail(f"no connection: {error.strerror or error}")
    finally:
        if transport is not None:
            transport.abort()
    return seen.record(due)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Exchange(asyncio.Protocol):
    """One connection with one request. httptools calls the `on_` methods."""

    def __init__(self, request: bytes, clock: Clock) -> None:
        self.done = asyncio.Event()
        self._request = request
        self._clock = clock
        self._parser = httptools.HttpResponseParser(self)
        self._decoder = msgspec.json.Decoder(_Chunk)
        self._buffer = b""
        self._now = self._sent = self._ended = clock()
        self._deliveries: list[float] = []
        self._counts: list[int] = []
        self._usage: _Usage | None = None
        self._finished = False
        self._error: str | None = None

    def record(self, due: float) -> Record:
        """What was seen."""
        usage = self._usage
        counted = bool(self._counts) and len(self._counts) == len(self._deliveries)
        return Record(
            due=due,
            sent=self._sent,
            ended=self._ended,
            deliveries=tuple(self._deliveries),
            counts=tuple(self._counts) if counted else (),
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            error=self._error,
        )

    def fail(self, reason: str) -> None:
        """End with an error; the first one counts."""
        if not self.done.is_set():
            self._error = reason
            self._end()

    def _end(self) -> None:
        self._ended = self._clock()
        self.done.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._sent = self._clock()
        cast(asyncio.WriteTransport, transport).write(self._request)  # uvloop's are none by type

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        if self.done.is_set():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.fail("the answer is not HTTP")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.is_set():
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == 200:
            self._read_events(body)
        elif len(self._buffer) < MAX_ERROR_BYTES:
            self._buffer += body

    def on_message_complete(self) -> None:
        if self.done.is_set():
            return
        status = self._parser.get_status_code()
        if status not in (0, 200):
            self.fail(f"HTTP {status}: {_error_text(self._buffer)}".rstrip(": "))
        elif not self._finished:
            self.fail("the reply was cut short")
        else:
            self._end()

    def _read_events(self, body: bytes) -> None:
        *lines, self._buffer = (self._buffer + body).split(b"\n")
        if len(self._buffer) > MAX_EVENT_BYTES:
            return self.fail("an event is too long")
        for line in lines:
            if line.startswith(b"data:"):
                self._read_event(line[5:].strip())

    def _read_event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._finished = True
            return
        try:
            chunk = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self.fail("an event is no completion chunk")
        if chunk.error is not None:
            return self.fail(f"error in the stream: {_message(chunk.error)}")
        self._note(chunk)

    def _note(self, chunk: _Chunk) -> None:
        self._usage = chunk.usage or self._usage
        if any(choice.finish_reason for choice in chunk.choices):
            self._finished = True
        if any(choice.has_text for choice in chunk.choices):
            self._deliveries.append(self._now)
            if chunk.usage:
                self._counts.append(chunk.usage.completion_tokens)


def _error_text(body: bytes) -> str:
    """OpenAI's error message, else the start of the body."""
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return " ".join(body.decode("utf-8", "replace").split())[:MAX_ERROR_TEXT]
    return _message(parsed.get("error", parsed) if isinstance(parsed, dict) else parsed)


def _message(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:MAX_ERROR_TEXT]
