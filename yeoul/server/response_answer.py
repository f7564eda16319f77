"""The answer of /v1/responses: one Response object, or the events that build it up. Owns these shapes and what
accumulates while a call runs; must not know HTTP or the engine.
"""

from __future__ import annotations

from typing import Any

import orjson

from yeoul.server.generation import Choice
from yeoul.server.replies.part import Part
from yeoul.server.replies.reader import ReplyReader
from yeoul.server.wire.call import Usage
from yeoul.server.wire.responses import ResponseCall
from yeoul.types import FinishReason


class _Item:
    """An output item while it grows: the message, or the reasoning before it."""

    def __init__(self, item_id: str, index: int, *, is_message: bool) -> None:
        self.id = item_id
        self.index = index
        self.is_message = is_message
        self.text = ""

    @property
    def place(self) -> dict[str, Any]:
        """What every event of the item's text names."""
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}

    @property
    def prefix(self) -> str:
        """The name of the text's own events, without their end."""
        return "response.output_text" if self.is_message else "response.reasoning_text"

    def part(self, text: str) -> dict[str, Any]:
        """The item's content part."""
        if self.is_message:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    def to_json(self, status: str) -> dict[str, Any]:
        """The item; without content while it is in progress."""
        content = [] if status == "in_progress" else [self.part(self.text)]
        if self.is_message:
            return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}
        return {"id": self.id, "type": "reasoning", "summary": [], "status": status, "content": content}


class ResponseAnswer:
    """One call's answer. Use `add` and `body`, or `chunk` and `tail` (and `failure`), not both."""

    def __init__(
        self,
        call: ResponseCall,
        reader: ReplyReader | None,
        *,
        answer_id: str,
        created: int,
        with_timings: bool = False,
    ) -> None:
        self._call = call
        self._reader = reader or ReplyReader(None, None)
        self._answer_id = answer_id
        self._created = created
        self._with_timings = with_timings
        self._items: list[_Item] = []
        self._finish_reason: FinishReason | None = None
        self._num_tokens_before_message = 0
        self._sequence_number = 0

    def add(self, choice: Choice) -> None:
        """Take in one output."""
        self._take(choice)

    def body(self, usage: Usage) -> dict[str, Any]:
        """The whole answer as JSON."""
        return self._response(self._end_status(), usage)

    def chunk(self, choice: Choice, usage: Usage) -> bytes:
        """The events of one output; empty while its text is held back. `usage`: comes at the end only."""
        opening = b""
        if not self._sequence_number:
            response = {"response": self._response("in_progress", None)}
            opening = self._event("response.created", response) + self._event("response.in_progress", response)
        return opening + self._take(choice)

    def tail(self, usage: Usage) -> bytes:
        """What ends a stream: the last item, then the whole response."""
        events = self._close_item()
        status = self._end_status()
        return events + self._event(f"response.{status}", {"response": self._response(status, usage)})

    def failure(self, body: dict[str, Any]) -> bytes:
        """The event of an error in mid-stream. `body`: OpenAI's error object."""
        error = body["error"]
        return self._event("error", {name: error[name] for name in ("code", "message", "param")})

    def _take(self, choice: Choice) -> bytes:
        output = choice.output
        events = self._take_part(self._reader.push(output.text))
        if not (self._items and self._items[-1].is_message):
            self._num_tokens_before_message += len(output.token_ids)
        if output.finish_reason is not None:
            self._finish_reason = output.finish_reason
            events += self._take_part(self._reader.finish())
            if not (self._items and self._items[-1].is_message):
                events += self._open_item(is_message=True)
        return events

    def _take_part(self, part: Part) -> bytes:
        events = b""
        for text, is_message in ((part.reasoning, False), (part.content, True)):
            if not text:
                continue
            if not self._items or self._items[-1].is_message != is_message:
                events += self._open_item(is_message=is_message)
            item = self._items[-1]
            item.text += text
            delta = {**item.place, "delta": text, **({"logprobs": []} if is_message else {})}
            events += self._event(f"{item.prefix}.delta", delta)
        return events

    def _open_item(self, *, is_message: bool) -> bytes:
        events = self._close_item()
        index = len(self._items)
        item = _Item(f"{'msg' if is_message else 'rs'}_{self._answer_id}", index, is_message=is_message)
        self._items.append(item)
        added = {"output_index": index, "item": item.to_json("in_progress")}
        events += self._event("response.output_item.added", added)
        return events + self._event("response.content_part.added", {**item.place, "part": item.part("")})

    def _close_item(self) -> bytes:
        if not self._items:
            return b""
        item = self._items[-1]
        done = {**item.place, "text": item.text, **({"logprobs": []} if item.is_message else {})}
        return (
            self._event(f"{item.prefix}.done", done)
            + self._event("response.content_part.done", {**item.place, "part": item.part(item.text)})
            + self._event("response.output_item.done", {"output_index": item.index, "item": self._item_json(item)})
        )

    def _item_json(self, item: _Item) -> dict[str, Any]:
        is_last = item is self._items[-1]
        return item.to_json(self._end_status() if is_last and self._finish_reason is not None else "completed")

    def _end_status(self) -> str:
        return "incomplete" if self._finish_reason is FinishReason.LENGTH else "completed"

    def _num_reasoning_tokens(self) -> int:
        """Tokens until the message began, tags included; 0 where there was no reasoning."""
        return self._num_tokens_before_message if self._items and not self._items[0].is_message else 0

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        call = self._call
        timings = usage.timings() if usage is not None and self._with_timings else None
        return {
            **({} if timings is None else {"timings": timings}),
            "id": f"resp_{self._answer_id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": call.instructions,
            "max_output_tokens": call.max_output_tokens,
            "metadata": call.metadata,
            "model": call.model,
            "output": [] if status == "in_progress" else [self._item_json(item) for item in self._items],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": call.params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": call.params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage_json(usage, self._num_reasoning_tokens()),
        }

    def _event(self, name: str, members: dict[str, Any]) -> bytes:
        data = {"type": name, "sequence_number": self._sequence_number, **members}
        self._sequence_number += 1
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def _usage_json(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
