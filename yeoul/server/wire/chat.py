"""/v1/chat/completions: its fields and its answers. Must not know completions, templates or HTTP."""

from __future__ import annotations

from typing import Any

import msgspec

from yeoul.server.wire.call import MAX_INT, Call, finish_fields, read_delivery, read_model
from yeoul.server.wire.fields import Fields, kind
from yeoul.server.wire.messages import read_messages
from yeoul.server.wire.parse import show
from yeoul.server.wire.sampling import read_sampling
from yeoul.server.wire.tools import ToolUse, read_tool_use
from yeoul.types import MAX_LOGPROBS, FinishReason

MAX_TEMPLATE_KWARGS = 32
SCALARS = (str, int, float)
RESERVED_NAMES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception")
)
"""What the template gets from elsewhere."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
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
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}


class ChatCall(Call, frozen=True, kw_only=True):
    """A checked chat request. `messages`: see wire/messages."""

    messages: list[dict[str, Any]]
    tool_use: ToolUse = ToolUse()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    def template_options(self) -> dict[str, Any]:
        """The options of TextService.encode_chat."""
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "tools": self.tool_use.tools or None,
            "variables": self.template_kwargs,
        }


def parse_chat(members: dict[str, Any], *, served: tuple[str, ...], vocab_size: int, max_messages: int) -> ChatCall:
    """Check a chat body. Raises RequestError or ModelNotServedError, naming the field."""
    fields = Fields(members)
    model = read_model(fields, served)
    messages = read_messages(fields, max_messages)
    tool_use = read_tool_use(fields)
    continues, adds_prompt = read_ending(fields, messages)
    template_kwargs = read_template_kwargs(fields)
    max_tokens, logprobs = _read_max_tokens(fields), _read_logprobs(fields)
    params = read_sampling(fields, vocab_size=vocab_size, max_tokens=max_tokens, logprobs=logprobs)
    delivery = read_delivery(fields)
    finish_fields(fields, NEUTRAL)
    return ChatCall(
        model=model,
        params=params,
        messages=messages,
        tool_use=tool_use,
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
        template_kwargs=template_kwargs,
        **delivery,
    )


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


def read_ending(fields: Fields, messages: list[dict[str, Any]]) -> tuple[bool, bool]:
    """(continue_final_message, add_generation_prompt): a reply either goes on with the last message or begins one."""
    continues = fields.boolean("continue_final_message")
    adds_prompt = fields.boolean("add_generation_prompt", default=not continues)
    if continues and adds_prompt:
        fields.refuse("continue_final_message", "and add_generation_prompt exclude each other")
    last = messages[-1]
    if continues and (last["role"] != "assistant" or "tool_calls" in last):
        fields.refuse("continue_final_message", "needs a last message of the assistant, without tool calls")
    return continues, adds_prompt


def read_template_kwargs(fields: Fields) -> dict[str, Any]:
    """Variables for the chat template: strings, numbers, booleans and lists of them, under names of their own."""
    given = fields.take("chat_template_kwargs")
    if given is None:
        return {}
    if not isinstance(given, dict):
        fields.refuse("chat_template_kwargs", f"must be an object, got {kind(given)}")
    if len(given) > MAX_TEMPLATE_KWARGS:
        fields.refuse("chat_template_kwargs", f"has {len(given)} members; at most {MAX_TEMPLATE_KWARGS} are allowed")
    for name, value in given.items():
        shown = f"chat_template_kwargs.{show(name)}"
        if name in RESERVED_NAMES or name.startswith("_") or not name.isidentifier():
            fields.refuse(shown, "cannot be given to a chat template")
        items = value if isinstance(value, list) else [value]
        if not all(item is None or isinstance(item, SCALARS) for item in items):
            fields.refuse(shown, "must be a string, a number, true, false or a list of those")
    return given
