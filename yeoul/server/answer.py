"""From outputs to answers: the whole JSON body, or the chunks of a stream. Owns what accumulates while a call runs;
the shapes themselves are in wire/. Must not know HTTP or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import orjson

from yeoul.server.generation import Choice
from yeoul.server.replies.reader import ReplyReader
from yeoul.server.wire.call import Call, Usage
from yeoul.server.wire.chat import chat_body, chat_choice, chat_delta, chat_role_delta
from yeoul.server.wire.chat_reply import ChatReply, part_chunks
from yeoul.server.wire.completions import completion_body, completion_choice
from yeoul.server.wire.logprobs import CompletionLogprobs, TokenTable, chat_logprobs, unscored
from yeoul.types import FinishReason, TokenLogprob, TokenOutput

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
    prompt_ids_in_choice: bool
    """Where a prompt's token ids stand: in each choice, as there may be several prompts, or beside the choices."""
    logprobs: Callable[[TokenTable], LogprobsToJson]
    """Makes the log-probability writer of one choice."""


COMPLETION = Shape(
    id_prefix="cmpl",
    chunk_object="text_completion",
    body=completion_body,
    choice=completion_choice,
    delta=completion_choice,
    opening=None,
    prompt_ids_in_choice=True,
    logprobs=lambda tokens: CompletionLogprobs(tokens).to_json,
)
CHAT = Shape(
    id_prefix="chatcmpl",
    chunk_object="chat.completion.chunk",
    body=chat_body,
    choice=chat_choice,
    delta=chat_delta,
    opening=chat_role_delta,
    prompt_ids_in_choice=False,
    logprobs=lambda tokens: partial(chat_logprobs, tokens=tokens),
)


@dataclass(slots=True)
class _ChoiceState:
    """One choice of the answer while it grows."""

    logprobs: LogprobsToJson | None
    reply: ChatReply | None = None
    """Where the text may hold more than content."""
    opened: bool = False
    echoed: bool = False
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
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
        prompts: Sequence[Sequence[int]],
        tokens: TokenTable,
        echoes: Sequence[str] = (),
        make_reader: Callable[[], ReplyReader | None] = lambda: None,
        with_timings: bool = False,
    ) -> None:
        """`echoes`: the prompts' texts, for a call with `echo`."""
        self._shape = shape
        self._call = call
        self._prompts = prompts
        self._echoes = echoes
        self._with_timings = with_timings
        self._head = {"id": f"{shape.id_prefix}-{answer_id}", "object": "", "created": created, "model": call.model}
        wanted = call.params.logprobs is not None
        num_choices = len(prompts) * call.params.n
        self._choices = [
            _ChoiceState(shape.logprobs(tokens) if wanted else None, _reply(make_reader())) for _ in range(num_choices)
        ]

    def add(self, choice: Choice) -> None:
        """Append one output."""
        state, output = self._choices[choice.index], self._echoed(choice)
        state.text.append(output.text)
        if state.reply is not None:
            state.reply.take(output.text, output.finish_reason)
        state.token_ids.extend(output.token_ids)
        state.entries.extend(output.logprobs)
        state.finish_reason = output.finish_reason

    def _echoed(self, choice: Choice) -> TokenOutput:
        """The output, with the prompt before the choice's first one where the call wants that."""
        state, output = self._choices[choice.index], choice.output
        if not self._call.echo or state.echoed:
            return output
        state.echoed = True
        logprobs = output.logprobs
        if self._call.params.prompt_logprobs is not None:
            logprobs = (unscored(self._prompt_of(choice.index)[0]), *output.prompt_logprobs, *logprobs)
        text = self._echoes[choice.index // self._call.params.n] + output.text
        return msgspec.structs.replace(output, text=text, logprobs=logprobs)

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer as JSON."""
        choices = [self._whole_choice(index, state) for index, state in enumerate(self._choices)]
        body = self._shape.body(self._head, choices, usage.to_json()) | self._timings(usage)
        if self._call.return_token_ids and not self._shape.prompt_ids_in_choice:
            body["prompt_token_ids"] = self._prompts[0]
        return body

    def _whole_choice(self, index: int, state: _ChoiceState) -> dict[str, Any]:
        logprobs = state.logprobs(state.entries) if state.logprobs is not None else None
        choice = self._shape.choice(index, "".join(state.text), logprobs, state.finish_reason)
        if state.reply is not None:
            choice = state.reply.amend(choice, state.finish_reason)
        if self._call.return_token_ids:
            choice["token_ids"] = state.token_ids
            if self._shape.prompt_ids_in_choice:
                choice["prompt_token_ids"] = self._prompt_of(index)
        return choice

    def _prompt_of(self, index: int) -> Sequence[int]:
        return self._prompts[index // self._call.params.n]

    def chunk(self, choice: Choice, usage: Usage) -> bytes:
        """The server-sent events of one output; empty while its text is held back. `usage`: so far."""
        state = self._choices[choice.index]
        deltas = self._deltas(state, choice)
        if not state.opened and self._shape.opening is not None:
            deltas.insert(0, self._shape.opening(choice.index))
        events = b""
        for delta in deltas:
            events += self._event(delta, usage, None if state.opened else choice.index)
            state.opened = True
        return events

    def _deltas(self, state: _ChoiceState, choice: Choice) -> list[dict[str, Any]]:
        """The choices of an output's chunks."""
        output = self._echoed(choice)
        wants_logprobs = state.logprobs is not None and bool(output.logprobs)
        wants_ids = self._call.return_token_ids and bool(output.token_ids)
        logprobs = state.logprobs(output.logprobs) if state.logprobs is not None and wants_logprobs else None
        deltas: list[dict[str, Any]] = []
        if state.reply is not None:
            parts, reason = state.reply.take(output.text, output.finish_reason), output.finish_reason
            if parts or logprobs or wants_ids or reason is not None:
                deltas = part_chunks(choice.index, parts, logprobs, state.reply.finish_reason(reason))
        elif output.text or wants_logprobs or wants_ids or output.finish_reason is not None:
            deltas = [self._shape.delta(choice.index, output.text, logprobs, output.finish_reason)]
        if deltas and self._call.return_token_ids:
            deltas[0]["token_ids"] = output.token_ids
        return deltas

    def tail(self, usage: Usage) -> bytes:
        """What ends a stream: a chunk of usage and timings, where they were asked for, and [DONE]."""
        extra = ({"usage": usage.to_json()} if self._call.include_usage else {}) | self._timings(usage)
        if not extra:
            return DONE
        return event({**self._head, "object": self._shape.chunk_object, "choices": [], **extra}) + DONE

    def _timings(self, usage: Usage) -> dict[str, Any]:
        timings = usage.timings() if self._with_timings else None
        return {} if timings is None else {"timings": timings}

    def failure(self, body: dict[str, Any]) -> bytes:
        """What ends a stream after an error. `body`: OpenAI's error object."""
        return event(body)

    def _event(self, choice: dict[str, Any], usage: Usage, first_of: int | None) -> bytes:
        """`first_of`: the choice whose first chunk this is; it has the prompt's token ids, where they are wanted."""
        chunk = {**self._head, "object": self._shape.chunk_object, "choices": [choice]}
        if first_of is not None and self._call.return_token_ids:
            holder = choice if self._shape.prompt_ids_in_choice else chunk
            holder["prompt_token_ids"] = self._prompt_of(first_of)
        if self._call.include_usage:
            chunk["usage"] = usage.to_json() if self._call.continuous_usage else None
        return event(chunk)


def _reply(reader: ReplyReader | None) -> ChatReply | None:
    return None if reader is None else ChatReply(reader)


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"
