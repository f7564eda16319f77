"""The messages of a chat: roles, text parts, tool calls of the assistant and their results. Owns what a message may
hold and the form in which templates get it; must not know what else a request has.
"""

from __future__ import annotations

from typing import Any

from yeoul.errors import RequestError
from yeoul.server.wire.fields import Fields, kind
from yeoul.server.wire.parse import parse_object, show

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOOL_CALLS = 128
MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
}
"""What an answer's own message holds beside its text, so that a client can send it back unchanged."""


def read_messages(fields: Fields, max_messages: int, *, instead: str | None = None) -> list[dict[str, Any]]:
    """`messages`, each as {"role", "content"} and, where it has them, "name", "tool_call_id", "reasoning_content" and
    "tool_calls", whose arguments are objects. Contents are one string. `instead`: the field that does as well.

    Raises RequestError, naming the field.
    """
    value = fields.take("messages")
    if value is None:
        fields.refuse("messages", "is required" if instead is None else f"or {instead} is required")
    if not isinstance(value, list):
        fields.refuse("messages", f"must be an array, got {kind(value)}")
    if not value:
        fields.refuse("messages", "must not be empty")
    if len(value) > max_messages:
        fields.refuse("messages", f"holds {len(value)} messages; at most {max_messages} are allowed")
    return [_read_message(fields, index, message) for index, message in enumerate(value)]


def _read_message(fields: Fields, index: int, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        fields.refuse(f"messages[{index}]", f"must be an object, got {kind(value)}")
    message = Fields(value, f"messages[{index}].")
    role = message.string("role")
    if role not in ROLES:
        got = "nothing" if role is None else show(role)
        message.refuse("role", f"must be one of {', '.join(ROLES)}, got {got}")
    calls = _read_tool_calls(message) if role == "assistant" else []
    result: dict[str, Any] = {"role": role, "content": _read_content(message, required=not calls)}
    if calls:
        result["tool_calls"] = calls
    result |= _read_texts(message, role)
    if role == "tool" and "tool_call_id" not in result:
        message.refuse("tool_call_id", "is required: the id of the call that this is the result of")
    message.neutral(MESSAGE_NEUTRAL)
    message.refuse_rest()
    return result


_TEXTS = {"assistant": ("name", "reasoning_content"), "tool": ("name", "tool_call_id")}


def _read_texts(message: Fields, role: str) -> dict[str, str]:
    """The further members of a role that are strings. An empty reasoning is none."""
    texts = {name: message.string(name) for name in _TEXTS.get(role, ("name",))}
    return {name: text for name, text in texts.items() if text is not None and (text or name != "reasoning_content")}


def _read_tool_calls(message: Fields) -> list[dict[str, Any]]:
    value = message.take("tool_calls")
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_TOOL_CALLS:
        message.refuse("tool_calls", f"must be an array of at most {MAX_TOOL_CALLS}, got {kind(value)}")
    return [_read_tool_call(message, index, call) for index, call in enumerate(value)]


def _read_tool_call(message: Fields, index: int, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        message.refuse(f"tool_calls[{index}]", f"must be an object, got {kind(value)}")
    call = message.nested(f"tool_calls[{index}]", value)
    call.ignore(("index",))  # what a stream's deltas have
    if (call_type := call.string("type")) not in (None, "function"):
        call.refuse("type", f"must be function, got {show(call_type)}")
    call_id, function = call.string("id"), call.object("function")
    if call_id is None or function is None:
        call.refuse("id" if call_id is None else "function", "is required")
    name, arguments = function.string("name"), _read_arguments(function)
    if name is None:
        function.refuse("name", "is required")
    function.refuse_rest()
    call.refuse_rest()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_arguments(function: Fields) -> dict[str, Any]:
    """The object that the JSON text stands for: templates write it out again. Empty text: no arguments."""
    text = function.string("arguments")
    if not text:
        return {}
    try:
        return parse_object(text.encode())
    except RequestError as error:
        function.refuse("arguments", f"must be the text of a JSON object: {error.message}")


def _read_content(message: Fields, *, required: bool) -> str:
    """A string, or a list of text parts, which are joined without anything between them."""
    value = message.take("content")
    if value is None and not required:
        return ""
    if value is None:
        message.refuse("content", "is required")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        message.refuse("content", f"must be a string or an array of text parts, got {kind(value)}")
    if not value:
        message.refuse("content", "must not be an empty array")
    return "".join(_read_part(message, index, part) for index, part in enumerate(value))


def _read_part(message: Fields, index: int, value: object) -> str:
    if not isinstance(value, dict):
        message.refuse(f"content[{index}]", f"must be an object, got {kind(value)}")
    part = message.nested(f"content[{index}]", value)
    if (part_type := part.string("type")) != "text":
        got = "nothing" if part_type is None else show(part_type)
        part.refuse("type", f"must be text (images, audio and files are not supported), got {got}")
    text = part.string("text")
    if text is None:
        part.refuse("text", "is required")
    part.refuse_rest()
    return text
