"""What every route does. Owns the order of a call's steps: refuse, read, parse, tokenize, submit, answer. Must not
know how any of them works, nor FastAPI.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from yeoul.engine.client import EngineClient
from yeoul.errors import EngineDeadError, RequestError, ShuttingDownError
from yeoul.obs.metrics import CONTENT_TYPE, Metrics
from yeoul.obs.spans import Spans
from yeoul.server.answer import CHAT, COMPLETION, Answer, Shape
from yeoul.server.auth import owner_of
from yeoul.server.body import read_body
from yeoul.server.call_span import follow
from yeoul.server.docs_page import DOCS_PAGE
from yeoul.server.edge import request_id_of
from yeoul.server.errors import dump
from yeoul.server.generation import Generation, unless_disconnected
from yeoul.server.options import ServerOptions
from yeoul.server.replies.reader import ReplyFormats, ReplyReader
from yeoul.server.response_answer import ResponseAnswer
from yeoul.server.stream import EventStream
from yeoul.server.text_service import TextService
from yeoul.server.wire.call import Call, model_not_served
from yeoul.server.wire.chat import ChatCall, parse_chat
from yeoul.server.wire.completions import parse_completion
from yeoul.server.wire.embeddings import Vector, embedding_body, parse_embedding, unit_vector
from yeoul.server.wire.parse import parse_object
from yeoul.server.wire.responses import parse_response
from yeoul.server.wire.tokens import parse_detokenize, parse_tokenize
from yeoul.types import Pooling, Structured, StructuredKind
from yeoul.types import Request as EngineRequest

TIMINGS_HEADER = "x-yeoul-timings"
"""`1`: the answer has a `timings` object."""


class Handlers:
    """The routes' functions over one engine client. `draining` is set once, when the server starts to shut down."""

    def __init__(
        self,
        client: EngineClient,
        text: TextService,
        options: ServerOptions,
        metrics: Metrics,
        formats: ReplyFormats,
        spans: Spans | None = None,
    ) -> None:
        self._client = client
        self._text = text
        self._options = options
        self._metrics = metrics
        self._formats = formats
        self._spans = spans
        self._served = options.served_model_names or (client.info.model_name,)
        self._defaults = options.sampling_defaults(client.info.sampling_defaults)
        self._started_at = int(time.time())
        self.software_version = version("yeoul")
        self._numbers = itertools.count()
        self.draining = False

    async def models(self, request: Request) -> Response:
        """The models that are served; all names are the same model."""
        return _json({"object": "list", "data": [self._model(name) for name in self._served]})

    async def model(self, request: Request) -> Response:
        """One model. 404 for a name that is not served."""
        name = request.path_params["model"]
        if name not in self._served:
            raise model_not_served(name, self._served)
        return _json(self._model(name))

    async def completions(self, request: Request) -> Response:
        """Continue one or more prompts."""
        self._refuse_new_work()
        members = parse_object(await read_body(request, self._options.max_body_bytes))
        call = parse_completion(
            members,
            served=self._served,
            vocab_size=self._client.info.vocab_size,
            max_prompts=self._options.max_prompts,
            max_sequences=self._options.max_sequences,
            defaults=self._defaults,
        )
        prompts = await self._encode(call, call.prompts)
        echoes = [self._text.decode(ids) for ids in prompts] if call.echo else []
        return await self._answer(request, call, COMPLETION, prompts, echoes=echoes)

    async def chat(self, request: Request) -> Response:
        """Continue a conversation with the assistant's turn."""
        self._refuse_new_work()
        members = parse_object(await read_body(request, self._options.max_body_bytes))
        call = parse_chat(
            members,
            served=self._served,
            vocab_size=self._client.info.vocab_size,
            max_messages=self._options.max_messages,
            defaults=self._defaults,
        )
        self._check_tools(call)
        prompt = await self._text.encode_chat(call.messages, **call.template_options())

        def make_reader() -> ReplyReader | None:
            use = call.tool_use
            return self._formats.reader(with_tools=bool(use.tools), one_call=use.one_call, prompt=prompt.text)

        call = self._forced(call, prompt.text)
        return await self._answer(request, call, CHAT, [self._cut(prompt.token_ids, call)], make_reader=make_reader)

    async def responses(self, request: Request) -> Response:
        """Answer an input; stateless."""
        self._refuse_new_work()
        members = parse_object(await read_body(request, self._options.max_body_bytes))
        call = parse_response(
            members,
            served=self._served,
            vocab_size=self._client.info.vocab_size,
            max_messages=self._options.max_messages,
            defaults=self._defaults,
        )
        prompt = await self._text.encode_chat(call.messages)
        reader = self._formats.reader(with_tools=False, one_call=False, prompt=prompt.text)
        generation, answer_id = await self._generate(request, "chat", call, [prompt.token_ids])
        answer = ResponseAnswer(
            call, reader, answer_id=answer_id, created=int(time.time()), with_timings=_wants_timings(request)
        )
        return await self._reply(request, call, generation, answer)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        members = parse_object(await read_body(request, self._options.max_body_bytes))
        call = parse_tokenize(members, served=self._served, max_messages=self._options.max_messages)
        if call.prompt is not None:
            ids = await self._text.encode(call.prompt, add_special=call.add_special)
        else:
            ids = (await self._text.encode_chat(call.messages, **call.options)).token_ids
        texts = [self._text.token_text(token_id) for token_id in ids] if call.with_texts else None
        length = self._client.info.max_model_len
        return _json({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": texts})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        members = parse_object(await read_body(request, self._options.max_body_bytes))
        ids = parse_detokenize(members, served=self._served, vocab_size=self._client.info.vocab_size)
        return _json({"prompt": await self._text.detokenize(ids)})

    async def tokenizer_info(self, request: Request) -> Response:
        """The tokenizer's special tokens and the chat template."""
        return _json(self._text.describe())

    async def embeddings(self, request: Request) -> Response:
        """One vector of length one for each input."""
        self._refuse_new_work()
        members = parse_object(await read_body(request, self._options.max_body_bytes))
        call = parse_embedding(
            members,
            served=self._served,
            vocab_size=self._client.info.vocab_size,
            max_inputs=self._options.max_sequences,
        )
        inputs = await self._encode(call, call.inputs)
        asked = [self._engine_request(request, call, ids, (), call.pooling) for ids in inputs]
        generation = self._start(request, "embeddings", call, asked)
        try:
            vectors = await unless_disconnected(request.receive, _collect_vectors(generation, len(inputs)))
        finally:
            await generation.aclose()
        return _json(embedding_body(call, vectors, generation.usage))

    async def _encode(self, call: Call, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        encoded = [p if isinstance(p, list) else await self._text.encode(p) for p in prompts]
        return [self._cut(ids, call) for ids in encoded]

    def _cut(self, ids: list[int], call: Call) -> list[int]:
        count = call.num_prompt_tokens(self._client.info.max_model_len)
        return ids if count is None else ids[-count:]

    async def health(self, request: Request) -> Response:
        """200 while the engine's loop moves, 503 when it is gone or stuck."""
        self._check_engine()
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 while new work is accepted, 503 otherwise."""
        self._refuse_new_work()
        self._check_engine()
        return _json({"status": "ready"})

    async def version(self, request: Request) -> Response:
        """Yeoul's version."""
        return _json({"version": self.software_version})

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def docs(self, request: Request) -> Response:
        """The API for readers, from /openapi.json; needs nothing from other hosts."""
        return HTMLResponse(DOCS_PAGE)

    def _check_tools(self, call: ChatCall) -> None:
        """Tools that the model would not see, or whose calls nobody would recognize, must not be accepted."""
        if call.tool_use.tools and not (self._formats.shows_tools and self._formats.tools):
            what = "does not write calls in a known format" if self._formats.shows_tools else "takes no tools"
            raise RequestError(
                f"this model's chat template {what}",
                hint="serve a model that was trained to use tools, or name its format with --tool-call-parser",
                param="tools",
            )

    def _forced(self, call: ChatCall, prompt: str) -> ChatCall:
        """The call, with a grammar where its reply must be tool calls."""
        use = call.tool_use
        if not use.forced:
            return call
        if call.params.structured is not None:
            raise RequestError("a forced tool_choice and a form of the reply exclude each other", param="tool_choice")
        source = self._formats.forced(use.forced, one_call=use.one_call, prompt=prompt)
        structured = Structured(StructuredKind.GRAMMAR, source, "tools")
        return msgspec.structs.replace(call, params=msgspec.structs.replace(call.params, structured=structured))

    async def _answer(
        self,
        request: Request,
        call: Call,
        shape: Shape,
        prompts: list[list[int]],
        *,
        echoes: Sequence[str] = (),
        make_reader: Callable[[], ReplyReader | None] = lambda: None,
    ) -> Response:
        generation, answer_id = await self._generate(request, shape.operation, call, prompts)
        answer = Answer(
            shape,
            call,
            answer_id=answer_id,
            created=int(time.time()),
            prompts=prompts,
            tokens=self._text,
            echoes=echoes,
            make_reader=make_reader,
            with_timings=_wants_timings(request),
        )
        return await self._reply(request, call, generation, answer)

    async def _generate(
        self, request: Request, operation: str, call: Call, prompts: list[list[int]]
    ) -> tuple[Generation, str]:
        """(the running requests, the answer's id without prefix)."""
        request_id = request_id_of(request.scope)
        await self._text.check_structured(call.params.structured)
        bad_words = await self._text.bad_word_ids(call.params.bad_words)
        asked = [self._engine_request(request, call, ids, bad_words) for ids in prompts]
        generation = self._start(request, operation, call, asked)
        return generation, f"{request_id}-{next(self._numbers)}"

    def _start(self, request: Request, operation: str, call: Call, asked: Sequence[EngineRequest]) -> Generation:
        """`operation`: what a span calls it."""
        generation = Generation(self._client, asked)
        if self._spans is not None:
            follow(self._spans, request, operation, call, generation)
        return generation

    async def _reply(
        self, request: Request, call: Call, generation: Generation, answer: Answer | ResponseAnswer
    ) -> Response:
        if call.stream:
            return EventStream(generation, answer, request_id_of(request.scope))
        try:
            return await unless_disconnected(request.receive, _collect(generation, answer))
        finally:
            await generation.aclose()

    def _engine_request(
        self,
        request: Request,
        call: Call,
        prompt: list[int],
        bad_words: tuple[tuple[int, ...], ...],
        pooling: Pooling | None = None,
    ) -> EngineRequest:
        """The engine's ids are unique in this process even where clients repeat theirs, and so are salts of two keys.

        A client's own salt has no colon.
        """
        owner, salt = owner_of(request.scope), call.cache_salt
        return EngineRequest(
            request_id=f"{request_id_of(request.scope)}:{next(self._numbers)}",
            prompt_token_ids=prompt,
            params=call.params,
            priority=call.priority,
            cache_salt=f"{owner}:{salt or ''}" if owner else salt,
            bad_word_ids=bad_words,
            pooling=pooling,
        )

    def _refuse_new_work(self) -> None:
        if self.draining:
            raise ShuttingDownError("the server is shutting down and takes no new requests")

    def _check_engine(self) -> None:
        stats = self._client.stats()
        if not stats.alive:
            raise EngineDeadError("the engine is not running")
        if stats.last_step_age > self._options.health_timeout:
            raise EngineDeadError(f"the engine has not moved for {stats.last_step_age:.0f} s")

    def _model(self, name: str) -> dict[str, Any]:
        info = self._client.info
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "yeoul",
            "max_model_len": info.max_model_len,
            "sampling_defaults": self._defaults,
        }


def _wants_timings(request: Request) -> bool:
    return request.headers.get(TIMINGS_HEADER) == "1"


async def _collect(generation: Generation, answer: Answer | ResponseAnswer) -> Response:
    async with aclosing(generation.outputs()) as outputs:
        async for choice in outputs:
            answer.add(choice)
    return _json(answer.body(generation.usage))


async def _collect_vectors(generation: Generation, count: int) -> list[Vector]:
    vectors: dict[int, Vector] = {}
    async with aclosing(generation.outputs()) as outputs:
        async for choice in outputs:
            vectors[choice.index] = unit_vector(choice.output.pooled)
    return [vectors[index] for index in range(count)]


def _json(body: dict[str, Any]) -> Response:
    return Response(dump(body), media_type="application/json")
