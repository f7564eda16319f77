"""The grammar of a reply that must be tool calls, in the words of the format that its reader knows. Owns these grammars
(Lark, as llguidance reads it); must not know how they are compiled or applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from yeoul.server.replies.tool_readers import HermesReader

REASONING = r"/([^<]|<[^\/])*<\/think>\n*/"
"""The rest of a reasoning that the prompt has opened."""


def forced_grammar(tools_format: str, tools: Sequence[Mapping[str, Any]], *, one_call: bool, in_reasoning: bool) -> str:
    """A Lark grammar for one or more calls of these tools. `tools_format`: a key of TOOL_READERS. Llama 3 has one."""
    is_hermes = tools_format == "hermes"
    key = "arguments" if is_hermes else "parameters"
    rules = [_tool_rules(index, tool["function"], key) for index, tool in enumerate(tools)]
    names = " | ".join(f"tool_{index}" for index in range(len(tools)))
    lines = [f"start: REASONING_END calls\nREASONING_END: {REASONING}" if in_reasoning else "start: calls"]
    lines.append("calls: call" if one_call or not is_hermes else 'calls: call ("\\n" call)*')
    if is_hermes:
        lines.append(f"call: {_text(HermesReader.OPEN)} ({names}) {_text(HermesReader.CLOSE)}")
    else:
        lines.append(f"call: {names}")
    return "\n".join([*lines, *rules]) + "\n"


def _tool_rules(index: int, function: Mapping[str, Any], key: str) -> str:
    head = f'{{"name": {json.dumps(function["name"])}, "{key}": '
    schema = {"type": "object", **(function.get("parameters") or {})}
    arguments = json.dumps(schema, ensure_ascii=False)
    return f"tool_{index}: {_text(head)} arguments_{index} {_text('}')}\narguments_{index}: %json {arguments}"


def _text(text: str) -> str:
    return json.dumps(text)
