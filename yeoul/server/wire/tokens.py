"""/tokenize and /detokenize, in vLLM's shapes. Owns their fields; must not know the tokenizer or HTTP."""

from __future__ import annotations

from typing import Any

import msgspec

from yeoul.server.wire.call import read_model
from yeoul.server.wire.chat import read_ending, read_template_kwargs
from yeoul.server.wire.completions import token_ids
from yeoul.server.wire.fields import Fields
from yeoul.server.wire.messages import read_messages
from yeoul.server.wire.tools import read_tool_use


class TokenizeCall(msgspec.Struct, frozen=True, kw_only=True):
    """Either `prompt`, or `messages` with the options of TextService.encode_chat."""

    prompt: str | None = None
    add_special: bool = True
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    with_texts: bool = False
    """The tokens' texts are wanted too."""


def parse_tokenize(members: dict[str, Any], *, served: tuple[str, ...], max_messages: int) -> TokenizeCall:
    """Check a /tokenize body. Raises RequestError or ModelNotServedError, naming the field."""
    fields = Fields(members)
    read_model(fields, served)
    with_texts = fields.boolean("return_token_strs")
    prompt = fields.string("prompt")
    if prompt is not None:
        call = TokenizeCall(
            prompt=prompt, add_special=fields.boolean("add_special_tokens", default=True), with_texts=with_texts
        )
    else:
        call = TokenizeCall(**_read_chat(fields, max_messages), with_texts=with_texts)
    fields.refuse_rest()
    return call


def _read_chat(fields: Fields, max_messages: int) -> dict[str, Any]:
    messages = read_messages(fields, max_messages, instead="prompt")
    continues, adds_prompt = read_ending(fields, messages)
    options = {
        "add_generation_prompt": adds_prompt,
        "continue_final_message": continues,
        "tools": read_tool_use(fields).tools or None,
        "variables": read_template_kwargs(fields),
    }
    fields.neutral({"add_special_tokens": (False,)})  # the template writes them
    return {"messages": messages, "options": options}


def parse_detokenize(members: dict[str, Any], *, served: tuple[str, ...], vocab_size: int) -> list[int]:
    """The token ids of a /detokenize body. Raises RequestError or ModelNotServedError, naming the field."""
    fields = Fields(members)
    read_model(fields, served)
    value = fields.take("tokens")
    if value is None:
        fields.refuse("tokens", "is required")
    fields.refuse_rest()
    return [] if value == [] else token_ids("tokens", "tokens", value, vocab_size)
