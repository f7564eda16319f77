"""From outputs to answers: the whole JSON body, or the chunks of a stream. Owns what accumulates while a call runs;
the shapes themselves are in wire/. Must not know HTTP or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from yeoul.server.generation import Choice
from yeoul.server.replies.reader import ReplyReader
from yeoul.server.wire.call import Call, Usage
from yeoul.server.wire.chat import chat_body, chat_choice, chat_delta, chat_role_delta
from yeoul.server.wire.chat_reply import ChatReply, part_chunks
from yeoul.server.wire.completions import completion_body, completion_choice
from yeoul.server.wire.logprobs import CompletionLogprobs, TokenTable, chat_logprobs
from yeoul.types import FinishReason, TokenLogprob

LogprobsToJson = Callable[[Iterable[TokenLogprob]], dict[str, Any]]
ChoiceToJson = Callable[[int, str, dict[str, Any] | None, FinishReason | None], dict[str, Any]]
BodyToJson = Callable[[dict[str, Any], list[dict[str, Any]], dict[str, Any]], dict[str, Any]]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """How an endpoint writes its answers."""

    id_prefix: str
    chunk_object: str
    body: BodyToJson
    choice: ChoiceToJson
    delta: ChoiceToJson
    opening: Callable[[int], dict[str, Any]] | None
    """The choice of the chunk that comes before a choice's first text."""
    logprobs: Callable[[TokenTable], LogprobsToJson]
    """Makes the log-probability writer of one choice."""


COMPLETION = Shape(
    id_prefix="cmpl",
    chunk_object="text_completion",
    body=completion_body,
    choice=completion_choice,
    delta=completion_choice,
    opening=None,
    logprobs=lambda tokens: CompletionLogprobs(tokens).to_json,
)
CHAT = Shape(
    id_prefix="chatcmpl",
    chunk_object="chat.completion.chunk",
    body=chat_body,
    choice=chat_choice,
    delta=chat_delta,
    opening=chat_role_delta,
    logprobs=lambda tokens: partial(chat_logprobs, tokens=tokens),
)


@dataclass(slots=True)
class _ChoiceState:
    """One choice of the answer while it grows."""

    logprobs: LogprobsToJson | None
    reply: ChatReply | None = None
    """Where the text may hold more than content."""
    opened: bool = False
    text: list[str] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Answer:
    """One call's answer. Use `add` and `body`, or `chunk` and `tail`, not both.

    `answer_id`: unique, without prefix. `created`: seconds since 1970. `make_reader`: for a chat whose replies may hold
    reasoning or tool calls.
    """

    def __init__(
        self,
        shape: Shape,
        call: Call,
        *,
        answer_id: str,
        created: int,
        num_choices: int,
        tokens: TokenTable,
        make_reader: Callable[[], ReplyReader | None] = lambda: None,
        with_timings: bool = False,
    ) -> None:
        self._shape = shape
        self._include_usage = call.include_usage
        self._with_timings = with_timings
        self._head = {"id": f"{shape.id_prefix}-{answer_id}", "object": "", "created": created, "model": call.model}
        wanted = call.params.logprobs is not None
        self._choices = [
            _ChoiceState(shape.logprobs(tokens) if wanted else None, _reply(make_reader())) for _ in range(num_choices)
        ]

    def add(self, choice: Choice) -> None:
        """Append one output."""
        state = self._choices[choice.index]
        state.text.append(choice.output.text)
        if state.reply is not None:
            state.reply.take(choice.output.text, choice.output.finish_reason)
        state.entries.extend(choice.output.logprobs)
        state.finish_reason = choice.output.finish_reason

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer as JSON."""
        choices = [self._choice(index, state) for index, state in enumerate(self._choices)]
        return self._shape.body(self._head, choices, usage.to_json()) | self._timings(usage)

    def _choice(self, index: int, state: _ChoiceState) -> dict[str, Any]:
        logprobs = state.logprobs(state.entries) if state.logprobs is not None else None
        choice = self._shape.choice(index, "".join(state.text), logprobs, state.finish_reason)
        return choice if state.reply is None else state.reply.amend(choice, state.finish_reason)

    def chunk(self, choice: Choice) -> bytes:
        """The server-sent events of one output; empty while its text is held back."""
        state = self._choices[choice.index]
        events = b""
        if not state.opened:
            state.opened = True
            if self._shape.opening is not None:
                events = self._event(self._shape.opening(choice.index))
        return events + b"".join(map(self._event, self._deltas(state, choice)))

    def _deltas(self, state: _ChoiceState, choice: Choice) -> list[dict[str, Any]]:
        """The choices of an output's chunks."""
        output = choice.output
        wants_logprobs = state.logprobs is not None and bool(output.logprobs)
        logprobs = state.logprobs(output.logprobs) if state.logprobs is not None and wants_logprobs else None
        if state.reply is not None:
            deltas = state.reply.take(output.text, output.finish_reason)
            return part_chunks(choice.index, deltas, logprobs, state.reply.finish_reason(output.finish_reason))
        if output.text or wants_logprobs or output.finish_reason is not None:
            return [self._shape.delta(choice.index, output.text, logprobs, output.finish_reason)]
        return []

    def tail(self, usage: Usage) -> bytes:
        """What ends a stream: a chunk of usage and timings, where they were asked for, and [DONE]."""
        extra = ({"usage": usage.to_json()} if self._include_usage else {}) | self._timings(usage)
        if not extra:
            return DONE
        return event({**self._head, "object": self._shape.chunk_object, "choices": [], **extra}) + DONE

    def _timings(self, usage: Usage) -> dict[str, Any]:
        timings = usage.timings() if self._with_timings else None
        return {} if timings is None else {"timings": timings}

    def failure(self, body: dict[str, Any]) -> bytes:
        """What ends a stream after an error. `body`: OpenAI's error object."""
        return event(body)

    def _event(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._head, "object": self._shape.chunk_object, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return event(chunk)


def _reply(reader: ReplyReader | None) -> ChatReply | None:
    return None if reader is None else ChatReply(reader)


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"
