"""A scripted engine, a byte tokenizer, and ways to call an app in process or over a socket; for tests/server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from yeoul.engine.client import EngineInfo, EngineStats
from yeoul.errors import ContextLengthError, RequestError, ShuttingDownError
from yeoul.server.app import create_app
from yeoul.server.listen import address, bind
from yeoul.server.options import ServerOptions
from yeoul.server.replies.reader import PLAIN
from yeoul.server.run import loop_factory, make_server
from yeoul.server.text_service import TextService
from yeoul.types import FinishReason, Request, TokenLogprob, TokenOutput

BOS, EOS, VOCAB_SIZE = 256, 257, 260
FRAGMENT_A, FRAGMENT_B = 0xF0, 0xE2


class ByteTokenizer:
    """One token per byte; 256 is BOS, 257 the end token."""

    vocab_size = VOCAB_SIZE
    end_ids = frozenset({EOS})
    bos_id, eos_id, adds_bos = BOS, EOS, True

    def __init__(self, *, bos: bool = True) -> None:
        self.bos = bos
        self.num_encoded = 0

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        self.num_encoded += 1
        return ([BOS] if self.bos and add_special else []) + list(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        parts = [bytes([i]) if i < 256 else self.token_text(i).encode() for i in ids]
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode("utf-8", "replace") if token_id < 256 else f"<{token_id}>"


class ToyPrompt(NamedTuple):
    """What ToyChat makes."""

    text: str
    token_ids: list[int]


class ToyChat:
    """`role:content|`, then `assistant:`. Refuses the content `refuse me`, as a template's raise_exception does.

    What else it was given is in `seen`.
    """

    source = "toy"

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.tokenizer = tokenizer
        self.seen: dict[str, Any] = {}

    def encode(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **options: Any
    ) -> ToyPrompt:
        if any(message["content"] == "refuse me" for message in messages):
            raise RequestError("the chat template refused the messages: roles must alternate", param="messages")
        self.seen = {"messages": messages, **options}
        text = "".join(f"{message['role']}:{message['content']}|" for message in messages)
        if options.get("continue_final_message"):
            text = text.removesuffix("|")
        text += "assistant:" if add_generation_prompt else ""
        return ToyPrompt(text, self.tokenizer.encode(text, add_special=False))


class Step:
    """One delivery of a script. `token_ids` default to the bytes of `text`."""

    def __init__(
        self,
        text: str = "",
        ids: tuple[int, ...] | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
        end: FinishReason | None = None,
        error: str | None = None,
    ) -> None:
        self.text, self.logprobs, self.end, self.error = text, logprobs, end, error
        self.ids = tuple(text.encode()) if ids is None else ids


Script = Callable[[Request, int], list[Step]]


def default_script(request: Request, index: int) -> list[Step]:
    """Every sequence answers its prompt's text in upper case plus its index, one byte a step, then the end token."""
    prompt = bytes(i for i in request.prompt_token_ids if i < 256).decode("utf-8", "replace")
    reply = prompt.upper() + str(index)
    limit = request.params.max_tokens
    steps = [Step(char) for char in reply]
    if request.params.logprobs is not None:
        steps = [Step(s.text, s.ids, tuple(_logprob(i, request.params.logprobs) for i in s.ids)) for s in steps]
    if limit is not None and len(steps) >= limit:
        steps = steps[:limit]
        steps[-1].end = FinishReason.LENGTH
    else:
        ends = (_logprob(EOS, request.params.logprobs),) if request.params.logprobs is not None else ()
        steps.append(Step("", (EOS,), ends, FinishReason.STOP))
    return steps


def _logprob(token_id: int, k: int) -> TokenLogprob:
    return TokenLogprob(token_id, -0.5, tuple((token_id + i, -0.5 - i) for i in range(k)))


class ScriptedClient:
    """An EngineClient that plays scripts. `hold` stops it before each request's step number `hold_at`."""

    def __init__(self, script: Script = default_script, *, max_model_len: int = 4096) -> None:
        self.script = script
        self.info = EngineInfo(
            model_name="toy",
            architecture="toy",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=8,
            block_size=16,
            num_kv_tokens=4096,
            executor="scripted",
        )
        self.engine_stats = EngineStats()
        self.requests: list[Request] = []
        self.active: set[str] = set()
        self.aborted: list[str] = []
        self.draining = False
        self.closed = False
        self.hold_at: int | None = None
        self.released = False
        self.drain_result: bool | None = None
        self.step_delay = 0.0
        self.check_hook: Callable[[Request], None] | None = None

    def stats(self) -> EngineStats:
        return self.engine_stats

    def check(self, request: Request) -> None:
        if self.check_hook is not None:
            self.check_hook(request)
        if self.draining:
            raise ShuttingDownError("draining")
        if not request.prompt_token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if len(request.prompt_token_ids) >= self.info.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(request.prompt_token_ids)} tokens; the context has {self.info.max_model_len}"
            )

    def submit(self, request: Request) -> AsyncIterator[TokenOutput]:
        self.check(request)
        assert request.request_id not in {one.request_id for one in self.requests}, "request ids must be unique"
        self.requests.append(request)
        self.active.add(request.request_id)
        return ScriptedOutputs(self, request)

    def abort(self, request_id: str) -> None:
        if request_id in self.active:
            self.active.discard(request_id)
            self.aborted.append(request_id)

    async def drain(self, timeout: float) -> bool:
        self.draining = True
        deadline = asyncio.get_running_loop().time() + timeout
        while self.active and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        self.drain_result = not self.active
        for request_id in list(self.active):
            self.abort(request_id)
        return self.drain_result

    async def close(self) -> None:
        self.closed = True


class ScriptedOutputs:
    """What submit returns. Sequences take turns; an abort by the engine ends the first sequence with ABORT."""

    def __init__(self, client: ScriptedClient, request: Request) -> None:
        self.client, self.request = client, request
        scripts = [client.script(request, index) for index in range(request.params.n)]
        longest = max(map(len, scripts))
        self.steps = [(i, s[t]) for t in range(longest) for i, s in enumerate(scripts) if t < len(s)]
        self.counts = [0] * len(scripts)
        self.position = 0
        self.closed = False

    def __aiter__(self) -> ScriptedOutputs:
        return self

    async def __anext__(self) -> TokenOutput:
        if self.closed or self.position == len(self.steps):
            raise StopAsyncIteration
        client = self.client
        while client.hold_at is not None and self.position >= client.hold_at and not client.released:
            if self.request.request_id not in client.active:
                self.closed = True
                return self._output(0, Step(end=FinishReason.ABORT))
            await asyncio.sleep(0.005)
        await asyncio.sleep(client.step_delay)
        index, step = self.steps[self.position]
        self.position += 1
        if self.position == len(self.steps):
            client.active.discard(self.request.request_id)
        self.counts[index] += len(step.ids)
        return self._output(index, step)

    def _output(self, index: int, step: Step) -> TokenOutput:
        return TokenOutput(
            request_id=self.request.request_id,
            index=index,
            text=step.text,
            token_ids=step.ids,
            logprobs=step.logprobs,
            finish_reason=step.end,
            error=step.error,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=self.counts[index],
            num_cached_tokens=2,
        )

    async def aclose(self) -> None:
        self.closed = True
        self.client.abort(self.request.request_id)


class Kit:
    """An app over a scripted client, called in process."""

    def __init__(
        self, script: Script = default_script, *, bos: bool = True, template: bool = True, **options: Any
    ) -> None:
        max_model_len = options.pop("max_model_len", 4096)
        formats = options.pop("formats", PLAIN)
        self.client = ScriptedClient(script, max_model_len=max_model_len)
        self.tokenizer = ByteTokenizer(bos=bos)
        self.chat_encoder = ToyChat(self.tokenizer)
        self.text = TextService(self.tokenizer, self.chat_encoder if template else None, max_model_len=max_model_len)
        self.options = ServerOptions(**{"port": 0, **options})
        self.app = create_app(self.client, self.text, self.options, formats=formats)

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return asyncio.run(self._request(method, path, **arguments))

    async def _request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.request(method, path, **arguments)

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return self.request("GET", path, **arguments)

    def complete(self, **body: Any) -> httpx.Response:
        return self.request("POST", "/v1/completions", json=body)

    def chat(self, **body: Any) -> httpx.Response:
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        return self.request("POST", "/v1/chat/completions", json=body)

    def raw(self, body: bytes, path: str = "/v1/completions") -> httpx.Response:
        return self.request("POST", path, content=body, headers={"content-type": "application/json"})


def events(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event; [DONE] as that string."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a refused request, after checking its shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and "\n" not in body["error"]["message"]
    assert response.headers["x-request-id"]
    return body["error"]


@contextmanager
def running(kit: Kit):
    """The kit's server on a real socket in a thread; yields its port, then drains it."""
    listener = bind(kit.options)
    server = make_server(kit.client, kit.text, kit.options)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        started = threading.Event()
        server.on_started = started.set
        thread = threading.Thread(target=runner.run, args=(server.serve(sockets=[listener]),))
        port = listener.getsockname()[1]
        thread.start()
        assert started.wait(10)
        kit.server = server
        try:
            yield port
        finally:
            server.stop()
            thread.join(15)
            assert not thread.is_alive()


def send_raw(port: int, data: bytes) -> socket.socket:
    """A connection that has sent `data`."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(data)
    return connection


def http_post(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a POST with a JSON body."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


@contextmanager
def engine_server(model: str, **config: Any):
    """A server over a real engine, in this process; yields its URL. `config`: of the engine, and `options` of the
    server."""
    with engine_parts(model, **config) as (url, _):
        yield url


@contextmanager
def engine_parts(model: str, **config: Any):
    """As engine_server; yields (URL, the parts that the server runs over)."""
    from yeoul.cli.serve import server_parts
    from yeoul.config import EngineConfig

    options = ServerOptions(port=0, **config.pop("options", {}))
    parts = server_parts(EngineConfig(model=model, **config), options)
    listener = bind(options)
    server = make_server(parts.client, parts.text, options, parts.metrics, parts.formats)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        started = threading.Event()
        server.on_started = started.set
        thread = threading.Thread(target=runner.run, args=(server.serve(sockets=[listener]),))
        thread.start()
        assert started.wait(10)
        try:
            yield address(listener), parts
        finally:
            server.stop()
            thread.join(15)
            asyncio.run(parts.client.close())
            parts.text.close()
            assert not thread.is_alive()
