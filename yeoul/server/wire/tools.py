"""Tools of a chat: their definitions, which of them a reply may call, and calls in answers. Owns these shapes; must not
know how a model writes a call.
"""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

import msgspec

from yeoul.server.wire.fields import Fields, kind
from yeoul.server.wire.parse import show

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
CHOICES = ("none", "auto", "required")


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """`tools`: as the client wrote them, for the template; empty where the reply may not call any."""

    tools: list[dict[str, Any]] = []
    one_call: bool = False
    """parallel_tool_calls was false, or the choice is one function."""
    forced: list[dict[str, Any]] = []
    """The tools of which the reply must call one; empty where it need not."""


def read_tool_use(fields: Fields) -> ToolUse:
    """`tools`, `tool_choice`, `parallel_tool_calls`. Raises RequestError, naming the field.

    With tool_choice "none" the model does not see the tools.
    """
    tools = _read_tools(fields)
    one_call = not fields.boolean("parallel_tool_calls", default=True)
    choice = fields.take("tool_choice")
    if choice is None or choice == "auto":
        return ToolUse(tools=tools, one_call=one_call)
    if choice == "none":
        return ToolUse()
    if choice == "required" and tools:
        return ToolUse(tools=tools, one_call=one_call, forced=tools)
    return ToolUse(tools=tools, one_call=True, forced=_read_named(fields, choice, tools))


def _read_named(fields: Fields, choice: object, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """{"type": "function", "function": {"name"}}: the tool of that name."""
    if choice == "required":
        fields.refuse("tool_choice", "is required, but there are no tools")
    if not isinstance(choice, dict):
        fields.refuse("tool_choice", f"must be {', '.join(CHOICES)} or an object, got {show(choice)}")
    named = fields.nested("tool_choice", choice)
    if named.string("type") != "function":
        named.refuse("type", "must be function")
    function = named.object("function")
    name = None if function is None else function.string("name")
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        named.refuse("function.name", f"names no tool: {show(name)}")
    return found[:1]


def _read_tools(fields: Fields) -> list[dict[str, Any]]:
    value = fields.take("tools")
    if value is None:
        return []
    if not isinstance(value, list):
        fields.refuse("tools", f"must be an array, got {kind(value)}")
    if len(value) > MAX_TOOLS:
        fields.refuse("tools", f"holds {len(value)} tools; at most {MAX_TOOLS} are allowed")
    for index, tool in enumerate(value):
        _check_tool(fields, index, tool)
    return value


def _check_tool(fields: Fields, index: int, value: object) -> None:
    if not isinstance(value, dict):
        fields.refuse(f"tools[{index}]", f"must be an object, got {kind(value)}")
    tool = fields.nested(f"tools[{index}]", value)
    if (tool_type := tool.string("type")) != "function":
        tool.refuse("type", f"must be function, got {'nothing' if tool_type is None else show(tool_type)}")
    function = tool.object("function")
    if function is None:
        tool.refuse("function", "is required")
    name = function.string("name")
    if name is None or not NAME.fullmatch(name):
        function.refuse("name", f"must be 1 to 64 letters, digits, _, - or ., got {show(name)}")
    function.string("description")
    function.object("parameters")
    function.neutral({"strict": (False,)})
    function.refuse_rest()
    tool.refuse_rest()


def new_call_id() -> str:
    """The id of a call in an answer; unique."""
    return f"call_{uuid4().hex[:24]}"


def call_json(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call of a whole answer. `arguments`: JSON text, as the model wrote it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
