"""LLM: the offline interface. Owns prompts in, texts out, in one thread. Must not know scheduling or HTTP.

Drives Engine.step in the caller's thread; not to be shared between threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from yeoul.config import EngineConfig
from yeoul.errors import ConfigError, RequestError
from yeoul.types import FinishReason, Request, SamplingParams, TokenLogprob, TokenOutput

if TYPE_CHECKING:
    from yeoul.engine.loop import Engine

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of a request's n continuations."""

    index: int
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    """An end token included."""
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    """One per token if asked for, else empty."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """One line, when finish_reason is ERROR."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """A finished request. `outputs` are in order of index."""

    request_id: str
    prompt: str | None
    """The text, as given or as the chat template made it; None for a prompt of token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)
    """One per prompt token but the first, if asked for."""


class LLM:
    """A model, ready to generate. Options are EngineConfig's fields; close it, or use it in a `with` statement."""

    def __init__(self, model: str, **options: Any) -> None:
        """`model`: a catalogue name or a path to a .gguf file.

        Raises ConfigError for an unknown option or one out of range, ModelError for a model that cannot be loaded.
        """
        from yeoul.engine.build import build_engine

        _check_names(options)
        self._start(build_engine(EngineConfig(model=model, **options)))

    @classmethod
    def from_engine(cls, engine: Engine) -> Self:
        """Take over an engine that was built elsewhere."""
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self.engine = engine
        self._num_requests = 0
        self._chat: Any = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, or lists of token ids, one or many. Outputs are in the order of the prompts.

        `params`: for all prompts, or one for each. Raises RequestError, before anything is computed, if any prompt can
        not be served; a sequence that fails while it runs has finish_reason ERROR instead.
        """
        listed = _as_list(prompts)
        encoded = [
            self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in listed
        ]
        return self._run([prompt if isinstance(prompt, str) else None for prompt in listed], encoded, params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of `{"role": ..., "content": ...}`) or several.

        Raises RequestError where the model has no chat template or it refuses the messages, else as `generate`.
        """
        if not messages:
            raise RequestError("there are no messages", param="messages")
        conversations = [messages] if isinstance(messages[0], Mapping) else list(messages)
        prompts = [self._chat_encoder().encode(conversation) for conversation in conversations]
        return self._run([prompt.text for prompt in prompts], [prompt.token_ids for prompt in prompts], params)

    def close(self) -> None:
        """Free threads and memory. Idempotent."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chat_encoder(self) -> Any:
        from yeoul.text.chat import ChatEncoder
        from yeoul.text.template import load_template

        if self._chat is None:
            template = load_template(self.engine.metadata)
            if template is None:
                raise RequestError("this model has no chat template", hint="use generate", param="messages")
            self._chat = ChatEncoder(self.engine.tokenizer, template)
        return self._chat

    def _run(
        self,
        prompts: Sequence[str | None],
        encoded: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        each = _params_for_each(params, len(encoded))
        requests = [self._request(ids, own) for ids, own in zip(encoded, each, strict=True)]
        for request in requests:
            self.engine.check(request)
            if request.params.structured is not None:
                self.engine.start_grammar(request.params.structured)
        results = {
            request.request_id: _empty(request, prompt) for request, prompt in zip(requests, prompts, strict=True)
        }
        try:
            self._drive(requests, results)
        finally:
            self._leave_nothing_behind(requests)
        return [results[request.request_id] for request in requests]

    def _request(self, token_ids: list[int], params: SamplingParams) -> Request:
        self._num_requests += 1
        from yeoul.text.bad_words import bad_word_ids

        return Request(
            request_id=f"llm-{self._num_requests}",
            prompt_token_ids=token_ids,
            params=params,
            bad_word_ids=bad_word_ids(self.engine.tokenizer, params.bad_words),
        )

    def _drive(self, requests: Sequence[Request], results: Mapping[str, RequestOutput]) -> None:
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            for output in self.engine.step().outputs:
                if output.request_id in results:
                    _append(results[output.request_id], output)

    def _leave_nothing_behind(self, requests: Sequence[Request]) -> None:
        """After an interrupt: what still runs must not go on in the next call."""
        if self.engine.has_work:
            for request in requests:
                self.engine.abort(request.request_id)
            self.engine.step()


def _check_names(options: Mapping[str, object]) -> None:
    for name in options:
        if name not in EngineConfig.__struct_fields__:
            raise ConfigError(
                f"there is no option {name!r}", hint=f"options: {', '.join(EngineConfig.__struct_fields__)}", param=name
            )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, told apart by what is inside."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} SamplingParams for {count} prompts", param="params")
    return list(params)


def _empty(request: Request, prompt: str | None) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[CompletionOutput(index=index) for index in range(request.params.n)],
    )


def _append(result: RequestOutput, output: TokenOutput) -> None:
    if output.index == 0:
        result.prompt_logprobs.extend(output.prompt_logprobs)
    target = result.outputs[output.index]
    target.text += output.text
    target.token_ids.extend(output.token_ids)
    target.logprobs.extend(output.logprobs)
    target.finish_reason = output.finish_reason
    target.error = output.error
