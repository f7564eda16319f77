"""ReplyReader: one choice's text, through reasoning to content and tool calls; and which formats a model writes.

Owns the choice of readers by the chat template's own words. Must not know JSON shapes or HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yeoul.server.replies.forced import forced_grammar
from yeoul.server.replies.part import Part, ToolReader
from yeoul.server.replies.reasoning import ThinkReader, ends_in_reasoning
from yeoul.server.replies.tool_readers import HermesReader, LlamaReader

TOOL_READERS: dict[str, type[HermesReader] | type[LlamaReader]] = {"hermes": HermesReader, "llama3_json": LlamaReader}
TOOL_CALL_PARSERS = ("auto", "none", *TOOL_READERS)
REASONING_PARSERS = ("auto", "none", "think")


class ReplyReader:
    """Push the text as it comes, then finish. `one_call`: calls after the first are dropped."""

    def __init__(self, think: ThinkReader | None, tools: ToolReader | None, *, one_call: bool = False) -> None:
        self._think = think
        self._tools = tools
        self._one_call = one_call

    @property
    def knows_reasoning(self) -> bool:
        """Whether reasoning is told apart."""
        return self._think is not None

    def push(self, text: str) -> Part:
        """The next piece of text; what is certain now."""
        reasoning, content = self._think.push(text) if self._think is not None else ("", text)
        return self._content(reasoning, content)

    def finish(self) -> Part:
        """The text is over: what was held back."""
        reasoning, content = self._think.finish() if self._think is not None else ("", "")
        part = self._content(reasoning, content)
        if self._tools is not None:
            rest = self._tools.finish()
            part.content += rest.content
        return part

    def _content(self, reasoning: str, content: str) -> Part:
        if self._tools is None:
            return Part(reasoning, content)
        part = self._tools.push(content)
        part.reasoning = reasoning
        if self._one_call:
            part.calls = [call for call in part.calls if call.index == 0]
        return part


@dataclass(frozen=True)
class ReplyFormats:
    """What one model writes. `tools`: a key of TOOL_READERS, or None. `reasoning`: whether it writes `<think>`."""

    tools: str | None = None
    reasoning: bool = False
    shows_tools: bool = False
    """Whether the chat template puts tools into the prompt."""

    def reader(self, *, with_tools: bool, one_call: bool, prompt: str) -> ReplyReader | None:
        """A new reader for a reply to `prompt`; None where all of it is content."""
        tools = TOOL_READERS[self.tools]() if with_tools and self.tools is not None else None
        think = ThinkReader(opened=ends_in_reasoning(prompt)) if self.reasoning else None
        return None if tools is None and think is None else ReplyReader(think, tools, one_call=one_call)

    def forced(self, tools: Sequence[Mapping[str, Any]], *, one_call: bool, prompt: str) -> str:
        """The grammar of a reply to `prompt` that calls these tools; `self.tools` must not be None."""
        in_reasoning = self.reasoning and ends_in_reasoning(prompt)
        return forced_grammar(self.tools or "", tools, one_call=one_call, in_reasoning=in_reasoning)


PLAIN = ReplyFormats()
"""All of a reply is content."""


def formats_of(template: str | None, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> ReplyFormats:
    """What a model writes, by its chat template, unless the options say it."""
    source = template or ""
    tools = _tools_of(source) if tool_call_parser == "auto" else tool_call_parser
    thinks = "</think>" in source or "<think>" in source
    reasoning = thinks if reasoning_parser == "auto" else reasoning_parser == "think"
    return ReplyFormats(
        tools=None if tools == "none" else tools,
        reasoning=reasoning,
        shows_tools=re.search(r"\btools\b", source) is not None,
    )


def _tools_of(source: str) -> str:
    if "<tool_call>" in source:
        return "hermes"
    writes_llama = '"parameters": ' in source and ("ipython" in source or "<|python_tag|>" in source)
    return "llama3_json" if writes_llama else "none"
