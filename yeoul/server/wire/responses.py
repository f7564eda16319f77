"""/v1/responses: its fields, and the input items as chat messages. Stateless: nothing is stored, nothing refers back.

Must not know the shape of the answer (wire/response_answer), templates or HTTP.
"""

from __future__ import annotations

from typing import Any

import msgspec

from yeoul.server.wire.call import IGNORED, MAX_INT, NEUTRAL, Call, read_delivery, read_model
from yeoul.server.wire.fields import Fields, kind
from yeoul.server.wire.parse import show
from yeoul.server.wire.sampling import read_sampling

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    "return_token_ids": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "truncate_prompt_tokens": (),
    "text": ({}, {"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": "medium"}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields of OpenAI's API, with the values that change nothing."""
ITEM_IGNORED = ("id", "status", "summary", "encrypted_content", "annotations", "logprobs", "phase")
"""What items of an earlier answer hold beside their text, so that a client can send them back unchanged."""


class ResponseCall(Call, frozen=True, kw_only=True):
    """A checked responses request. `messages`: as for chat, the instructions first."""

    messages: list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


def parse_response(
    members: dict[str, Any], *, served: tuple[str, ...], vocab_size: int, max_messages: int
) -> ResponseCall:
    """Check a responses body. Raises RequestError or ModelNotServedError, naming the field."""
    fields = Fields(members)
    model = read_model(fields, served)
    instructions = fields.string("instructions")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    messages += _read_input(fields, max_messages)
    max_output_tokens = fields.integer("max_output_tokens", 1, MAX_INT)
    fields.neutral(UNSUPPORTED)
    params = read_sampling(fields, vocab_size=vocab_size, max_tokens=max_output_tokens, logprobs=None)
    delivery = read_delivery(fields)
    metadata = _read_metadata(fields)
    fields.ignore(IGNORED)
    fields.neutral(NEUTRAL)
    fields.refuse_rest()
    return ResponseCall(
        model=model,
        params=params,
        messages=messages,
        instructions=instructions,
        max_output_tokens=max_output_tokens,
        metadata=metadata,
        **delivery,
    )


def _read_metadata(fields: Fields) -> dict[str, Any]:
    """Given back with the answer, as OpenAI does: at most 16 short strings."""
    value = fields.take("metadata")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        fields.refuse("metadata", "must be an object of strings")
    if len(value) > 16 or any(len(key) > 64 or len(text) > 512 for key, text in value.items()):
        fields.refuse("metadata", "must have at most 16 members, of 64 and 512 characters")
    return value


def _read_input(fields: Fields, max_messages: int) -> list[dict[str, Any]]:
    value = fields.take("input")
    if value is None:
        fields.refuse("input", "is required")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        fields.refuse("input", f"must be a string or an array, got {kind(value)}")
    if not 1 <= len(value) <= max_messages:
        fields.refuse("input", f"holds {len(value)} items; 1 to {max_messages} are allowed")
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            fields.refuse(f"input[{index}]", f"must be an object, got {kind(item)}")
        read = fields.nested(f"input[{index}]", item)
        item_type = read.string("type")
        if item_type == "reasoning":
            reasoning += _read_reasoning(read)
            continue
        messages.append(_read_message(read, item_type, reasoning))
        reasoning = ""
    if not messages:
        fields.refuse("input", "holds no message")
    return messages


def _read_reasoning(item: Fields) -> str:
    item.ignore(ITEM_IGNORED)
    text = _read_texts(item, ("reasoning_text",), required=False)
    item.refuse_rest()
    return text


def _read_message(item: Fields, item_type: str | None, reasoning: str) -> dict[str, Any]:
    """`reasoning`: what came before this message, which belongs to the assistant's."""
    if item_type not in (None, "message"):
        item.refuse("type", f"must be message or reasoning, got {show(item_type)}")
    role = item.string("role")
    if role not in ROLES:
        item.refuse("role", f"must be one of {', '.join(ROLES)}, got {'nothing' if role is None else show(role)}")
    item.ignore(ITEM_IGNORED)
    message = {"role": role, "content": _read_texts(item, TEXT_PARTS, required=True)}
    item.refuse_rest()
    return message | ({"reasoning_content": reasoning} if reasoning and role == "assistant" else {})


def _read_texts(item: Fields, types: tuple[str, ...], *, required: bool) -> str:
    """`content`: a string, or parts of these types, joined without anything between them."""
    value = item.take("content")
    if value is None and not required:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        item.refuse("content", f"must be a string or an array of parts, got {kind(value)}")
    texts: list[str] = []
    for index, one in enumerate(value):
        if not isinstance(one, dict):
            item.refuse(f"content[{index}]", f"must be an object, got {kind(one)}")
        part = item.nested(f"content[{index}]", one)
        part_type, text = part.string("type"), part.string("text")
        if part_type not in types:
            part.refuse("type", f"must be one of {', '.join(types)}, got {show(part_type)}")
        if text is None:
            part.refuse("text", "is required")
        part.ignore(ITEM_IGNORED)
        part.refuse_rest()
        texts.append(text)
    return "".join(texts)
