"""Replies of a chat that hold more than text: reasoning and tool calls, whole or as deltas. Owns what accumulates for
one choice and its shape; must not know how a model writes them.
"""

from __future__ import annotations

from typing import Any

from yeoul.server.replies.part import Part
from yeoul.server.replies.reader import ReplyReader
from yeoul.server.wire.tools import call_json, new_call_id
from yeoul.types import FinishReason


class ChatReply:
    """One choice while it is read. `take` everything, then `amend`; or send the `deltas` of everything."""

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._call_ids: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    def take(self, text: str, finish_reason: FinishReason | None) -> list[dict[str, Any]]:
        """The deltas of the next text, most often one or none; what was held back comes with the end."""
        deltas = self._take(self._reader.push(text))
        return deltas if finish_reason is None else deltas + self._take(self._reader.finish())

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """`tool_calls` where calls are why the reply ended."""
        return "tool_calls" if reason is FinishReason.STOP and self._call_ids else reason

    def amend(self, choice: dict[str, Any], reason: FinishReason | None) -> dict[str, Any]:
        """A choice of the whole answer, with what was read in place of the text."""
        message = {**choice["message"], "content": "".join(self._content) or (None if self._call_ids else "")}
        if self._reader.knows_reasoning:
            message["reasoning_content"] = "".join(self._reasoning) or None
        if self._call_ids:
            calls = zip(self._call_ids, self._names, self._arguments, strict=True)
            message["tool_calls"] = [call_json(call_id, name, "".join(texts)) for call_id, name, texts in calls]
        return {**choice, "message": message, "finish_reason": self.finish_reason(reason)}

    def _take(self, part: Part) -> list[dict[str, Any]]:
        self._reasoning.append(part.reasoning)
        self._content.append(part.content)
        deltas: list[dict[str, Any]] = []
        if part.reasoning:
            deltas.append({"reasoning_content": part.reasoning})
        if part.content:
            deltas.append({"content": part.content})
        for call in part.calls:
            deltas.append({"tool_calls": [self._call_delta(call.index, call.name, call.arguments)]})
        return deltas

    def _call_delta(self, index: int, name: str | None, arguments: str) -> dict[str, Any]:
        if name is None:
            self._arguments[index].append(arguments)
            return {"index": index, "function": {"arguments": arguments}}
        self._call_ids.append(new_call_id())
        self._names.append(name)
        self._arguments.append([arguments])
        return {"index": index, **call_json(self._call_ids[index], name, arguments)}


def part_chunks(
    index: int, deltas: list[dict[str, Any]], logprobs: dict[str, Any] | None, finish_reason: str | None
) -> list[dict[str, Any]]:
    """The choices of the chunks of one output: one for each delta, log-probabilities with the first, the end with the
    last. None where there is nothing to say."""
    if not deltas and (logprobs or finish_reason):
        deltas = [{}]
    last = len(deltas) - 1
    return [
        {
            "index": index,
            "delta": delta,
            "logprobs": logprobs if place == 0 else None,
            "finish_reason": finish_reason if place == last else None,
        }
        for place, delta in enumerate(deltas)
    ]
