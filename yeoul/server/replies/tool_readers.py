"""The formats in which models write tool calls. Owns what is around a call; the call itself is a CallObject."""

from __future__ import annotations

from yeoul.server.replies.call_object import MAX_HEADER, CallObject
from yeoul.server.replies.part import Part, split_at


class HermesReader:
    """`<tool_call>{...}</tool_call>`, any number of them, between other text (Hermes, Qwen 2.5 and 3).

    White space after a call is dropped. What stands in the tags and is no call is content, tags included.
    """

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._call: CallObject | None = None
        self._num_calls = 0
        self._closing = False
        """A call is complete; its closing tag is due."""
        self._after_call = False

    def push(self, text: str) -> Part:
        """See ToolReader."""
        part = Part()
        while text:
            if self._call is not None:
                text = self._push_call(self._call, text, part)
            elif self._closing:
                text = self._push_closing(text)
            else:
                text = self._push_text(text, part)
        return part

    def finish(self) -> Part:
        """See ToolReader. A call that was cut off stays as far as it was told."""
        if self._call is not None:
            return Part(content="" if self._call.told else self.OPEN + self._call.raw)
        return Part(content="" if self._closing else self._held)

    def _push_text(self, text: str, part: Part) -> str:
        text = self._held + text
        self._held = ""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        content, found, rest = split_at(text, self.OPEN)
        part.content += content
        if found:
            self._call = CallObject(self._num_calls)
            return rest
        self._held = rest
        return ""

    def _push_call(self, call: CallObject, text: str, part: Part) -> str:
        deltas, rest = call.push(text)
        part.calls += deltas
        if call.broken:
            part.content += self.OPEN + call.raw
            self._call = None
        elif call.complete:
            self._num_calls += 1
            self._call, self._closing = None, True
        return rest

    def _push_closing(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        tag = text.lstrip()
        if self.CLOSE.startswith(tag) and tag != self.CLOSE:
            self._held = text
            return ""
        self._closing, self._after_call = False, True
        return tag.removeprefix(self.CLOSE)


class LlamaReader:
    """A reply that is `{"name": ..., "parameters": {...}}` from its start; several have `;` between them (Llama 3).

    A reply that starts with anything else, or with JSON that is no call, is content.
    """

    def __init__(self) -> None:
        self._held = ""
        self._call: CallObject | None = None
        self._num_calls = 0
        self._is_plain = False

    def push(self, text: str) -> Part:
        """See ToolReader."""
        part = Part()
        while text:
            if self._is_plain:
                part.content += text
                text = ""
            elif self._call is not None:
                text = self._push_call(self._call, text, part)
            else:
                text = self._push_start(text)
        return part

    def finish(self) -> Part:
        """See ToolReader. A call that was cut off stays as far as it was told."""
        if self._call is not None:
            return Part(content="" if self._call.told else self._call.raw)
        return Part(content="" if self._num_calls else self._held)

    def _push_start(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        skipped = text.lstrip() if not self._num_calls else text.lstrip("; \n\r\t")
        if not skipped:
            self._held = text
            return ""
        if skipped[0] == "{":
            self._call = CallObject(self._num_calls)
            return text if not self._num_calls else skipped
        self._is_plain = True
        return text if not self._num_calls else skipped

    def _push_call(self, call: CallObject, text: str, part: Part) -> str:
        deltas, rest = call.push(text)
        part.calls += deltas
        if call.broken or (not call.told and len(call.raw) > MAX_HEADER):
            part.content += call.raw
            self._call, self._is_plain = None, True
        elif call.complete:
            self._num_calls += 1
            self._call = None
        return rest
