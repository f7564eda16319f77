"""/v1/chat/completions: its fields and its answers. Must not know completions, templates or HTTP."""

from __future__ import annotations

from typing import Any

from yeoul.server.wire.call import MAX_INT, Call, finish_fields, read_delivery, read_model
from yeoul.server.wire.fields import Fields, kind
from yeoul.server.wire.parse import show
from yeoul.server.wire.sampling import read_sampling
from yeoul.types import MAX_LOGPROBS, FinishReason

ROLES = ("system", "developer", "user", "assistant")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "function_call": (),
    "reasoning_content": ("",),
}
"""What an answer's own message holds beside its text, so that a client can send it back unchanged."""


class ChatCall(Call, frozen=True, kw_only=True):
    """A checked chat request; every message is {"role", "content"} (and "name"), its content one string."""

    messages: list[dict[str, Any]]


def parse_chat(members: dict[str, Any], *, served: tuple[str, ...], vocab_size: int, max_messages: int) -> ChatCall:
    """Check a chat body. Raises RequestError or ModelNotServedError, naming the field."""
    fields = Fields(members)
    model = read_model(fields, served)
    messages = _read_messages(fields, max_messages)
    max_tokens, logprobs = _read_max_tokens(fields), _read_logprobs(fields)
    params = read_sampling(fields, vocab_size=vocab_size, max_tokens=max_tokens, logprobs=logprobs)
    delivery = read_delivery(fields)
    finish_fields(fields, NEUTRAL)
    return ChatCall(model=model, params=params, messages=messages, **delivery)


def chat_body(head: dict[str, Any], choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    """The whole answer. `head`: id, created, model."""
    return {**head, "object": "chat.completion", "choices": choices, "usage": usage}


def chat_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: FinishReason | None
) -> dict[str, Any]:
    """One choice of the whole answer."""
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def chat_delta(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: FinishReason | None
) -> dict[str, Any]:
    """One choice of one chunk; a delta without text is empty."""
    delta = {"content": text} if text or logprobs else {}
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def chat_role_delta(index: int) -> dict[str, Any]:
    """The chunk that opens a choice."""
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _read_max_tokens(fields: Fields) -> int | None:
    """`max_completion_tokens` or its older name `max_tokens`; both only if equal. None: the rest of the context."""
    older = fields.integer("max_tokens", 1, MAX_INT)
    newer = fields.integer("max_completion_tokens", 1, MAX_INT)
    if older is not None and newer is not None and older != newer:
        fields.refuse("max_tokens", f"is {older} but max_completion_tokens is {newer}; send one of them")
    return older if newer is None else newer


def _read_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not wanted:
        fields.refuse("top_logprobs", "needs logprobs to be true")
    return (top or 0) if wanted else None


def _read_messages(fields: Fields, max_messages: int) -> list[dict[str, Any]]:
    value = fields.take("messages")
    if value is None:
        fields.refuse("messages", "is required")
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
    result: dict[str, Any] = {"role": role, "content": _read_content(message)}
    if (name := message.string("name")) is not None:
        result["name"] = name
    message.neutral(MESSAGE_NEUTRAL)
    message.refuse_rest()
    return result


def _read_content(message: Fields) -> str:
    """A string, or a list of text parts, which are joined without anything between them."""
    value = message.take("content")
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
