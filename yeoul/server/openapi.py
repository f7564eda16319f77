"""The request bodies as OpenAPI describes them. Owns documentation only: what is accepted is decided in server/wire,
and a test keeps the two field lists equal.
"""

from __future__ import annotations

from typing import Any

from yeoul.server.wire.call import IGNORED
from yeoul.server.wire.messages import ROLES
from yeoul.server.wire.responses import ROLES as RESPONSE_ROLES
from yeoul.server.wire.structured import FORMATS, OUTPUTS
from yeoul.server.wire.tools import CHOICES, MAX_TOOLS, NAME
from yeoul.types import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEQUENCES_PER_REQUEST,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    Pooling,
)

DESCRIPTION = (
    "OpenAI-compatible inference. An explicit null means absent. Integers must be written as integers: 5.0 is refused. "
    "Fields of OpenAI's and vLLM's APIs that are not listed are accepted at the value that changes nothing and refused "
    "otherwise; unknown names are refused. Ignored at any value: " + ", ".join(IGNORED) + "."
)

Schema = dict[str, Any]


def _string(text: str) -> Schema:
    return {"type": "string", "description": text}


def _integer(low: int, high: int, text: str) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, "description": text}


def _number(low: float, high: float, default: float, text: str) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high, "default": default, "description": text}


def _boolean(text: str, *, default: bool = False) -> Schema:
    return {"type": "boolean", "default": default, "description": text}


def _ids(most: int, text: str) -> Schema:
    ids = {"type": "integer", "minimum": 0}
    return {"type": "array", "items": ids, "maxItems": most, "description": text}


_STOP: Schema = {
    "description": f"Texts that end the reply and are not part of it; at most {MAX_STOP_STRINGS}.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS},
    ],
}
_SHARED: dict[str, Schema] = {
    "model": _string("A name of the served model; absent: the first one."),
    "temperature": _number(0, 1e6, 1, "0 is greedy."),
    "top_p": _number(0, 1, 1, "1 is off; 0 keeps only the likeliest token."),
    "top_k": _integer(-1, 2**31 - 1, "0 and -1 are off."),
    "min_p": _number(0, 1, 0, "0 is off."),
    "seed": _integer(-(2**63), 2**63 - 1, "The same seed and request give the same reply."),
    "n": _integer(1, MAX_SEQUENCES_PER_REQUEST, "Replies for each prompt."),
    "stop": _STOP,
    "stop_token_ids": _ids(MAX_STOP_TOKEN_IDS, "More tokens that end the reply."),
    "include_stop_str_in_output": _boolean("Show the stop string or token that ended the reply."),
    "skip_special_tokens": {**_boolean("Leave special tokens out of the text."), "default": True},
    "min_tokens": _integer(0, 2**31 - 1, "Nothing but the context's end ends the reply before it has so many tokens."),
    "ignore_eos": _boolean("Go on after end tokens."),
    "frequency_penalty": _number(
        -2, 2, 0, "Subtracted for each time that a token was generated; prompts do not count."
    ),
    "presence_penalty": _number(-2, 2, 0, "Subtracted once if a token was generated; prompts do not count."),
    "repetition_penalty": _number(0.01, 100, 1, "Divides the logits of all tokens in prompt and reply, once each."),
    "logit_bias": {
        "type": "object",
        "description": "Token id to what is added to its logit, after penalties; logprobs do not show it.",
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": MAX_LOGIT_BIAS,
    },
    "allowed_token_ids": {**_ids(2**31 - 1, "No other tokens are generated."), "minItems": 1},
    "bad_words": {
        "type": "array",
        "description": "Words that are not generated, as they are and after a space.",
        "items": {"type": "string"},
        "maxItems": MAX_BAD_WORDS,
    },
    "response_format": {
        "type": "object",
        "description": "The reply's form: text, any JSON object, or JSON of a schema.",
        "properties": {
            "type": {"type": "string", "enum": list(FORMATS)},
            "json_schema": {"type": "object", "properties": {"name": {"type": "string"}, "schema": {"type": "object"}}},
        },
    },
    "structured_outputs": {
        "type": "object",
        "description": "The reply's form, as exactly one of: " + ", ".join(OUTPUTS) + ".",
        "properties": {
            "json": {"type": ["object", "string"]},
            "regex": {"type": "string"},
            "choice": {"type": "array", "items": {"type": "string"}},
            "grammar": {"type": "string"},
            "json_object": {"const": True},
        },
    },
    "truncate_prompt_tokens": _integer(1, 2**31 - 1, "Only so many of the prompt's last tokens are used."),
    "priority": _integer(-(2**31), 2**31 - 1, "Lower is served earlier, where the server schedules by priority."),
    "cache_salt": {**_string("Prompts share cached blocks only with the same salt."), "maxLength": 128},
    "return_token_ids": _boolean("Give the token ids of prompt and reply."),
    "stream": _boolean("Send server-sent events."),
    "stream_options": {
        "type": "object",
        "description": "Only with stream.",
        "properties": {
            "include_usage": _boolean("One more chunk with token counts before [DONE]."),
            "continuous_usage_stats": _boolean("And the counts so far in every chunk."),
        },
    },
}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
COMPLETION_PROPERTIES: dict[str, Schema] = {
    "prompt": {
        "description": "A text, several texts, token ids, or several lists of token ids.",
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            _IDS,
            {"type": "array", "items": _IDS, "minItems": 1},
        ],
    },
    "max_tokens": _integer(0, 2**31 - 1, "Default 16; 0 only with echo."),
    "echo": _boolean("The reply begins with the prompt; with logprobs the prompt's tokens have theirs, too."),
    "logprobs": _integer(0, MAX_LOGPROBS, "Log-probabilities of the chosen and of this many likeliest tokens."),
    **_SHARED,
}
_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": _string("The text of a JSON object.")},
            "required": ["name"],
        },
    },
    "required": ["id", "function"],
}
_NAMED: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]},
        "name": {"type": "string"},
        "reasoning_content": _string("Of the assistant: given to the chat template."),
        "tool_calls": {"type": "array", "items": _CALL, "description": "Of the assistant."},
        "tool_call_id": _string("Of a tool: which call this is the result of."),
    },
    "required": ["role"],
}
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
CHAT_PROPERTIES: dict[str, Schema] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "description": "The conversation so far."},
    "tools": {
        "type": "array",
        "items": _TOOL,
        "maxItems": MAX_TOOLS,
        "description": "Functions that the reply may call, where the model's chat template takes tools.",
    },
    "tool_choice": {
        "description": "none: the model does not see the tools. required, or a function by name: the reply is a call.",
        "anyOf": [{"type": "string", "enum": list(CHOICES)}, _NAMED],
    },
    "parallel_tool_calls": _boolean("false: calls after the first are dropped.", default=True),
    "add_generation_prompt": _boolean("Begin a reply of the assistant.", default=True),
    "continue_final_message": _boolean("Go on with the last message instead, which is the assistant's."),
    "chat_template_kwargs": {
        "type": "object",
        "description": "Variables for the chat template: strings, numbers, booleans or lists of them.",
    },
    "max_completion_tokens": _integer(1, 2**31 - 1, "Default: the rest of the context."),
    "max_tokens": _integer(1, 2**31 - 1, "The older name of max_completion_tokens."),
    "logprobs": _boolean("Log-probabilities of the chosen tokens."),
    "top_logprobs": _integer(0, MAX_LOGPROBS, "And of this many likeliest tokens; needs logprobs."),
    **_SHARED,
}
EMBEDDING_PROPERTIES: dict[str, Schema] = {
    "input": COMPLETION_PROPERTIES["prompt"],
    "model": _SHARED["model"],
    "encoding_format": {"type": "string", "enum": ["float", "base64"], "description": "base64: float32 values."},
    "pooling": {"type": "string", "enum": list(Pooling), "description": "Of the last hidden states; default last."},
    **{name: _SHARED[name] for name in ("truncate_prompt_tokens", "priority", "cache_salt")},
}
_ITEM: Schema = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["message", "reasoning"]},
        "role": {"type": "string", "enum": list(RESPONSE_ROLES)},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {"type": {"type": "string"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        },
    },
}
_SAMPLING = {name: schema for name, schema in _SHARED.items() if name not in ("n", "stream_options")}
RESPONSES_PROPERTIES: dict[str, Schema] = {
    "input": {
        "description": "A text, or messages of user and assistant. Nothing is stored.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}],
    },
    "instructions": _string("What the system says before the input."),
    "max_output_tokens": _integer(1, 2**31 - 1, "Default: the rest of the context."),
    "metadata": {"type": "object", "description": "Strings that the answer repeats."},
    **_SAMPLING,
}
_CHAT_TOKENS = ("messages", "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt",
                "continue_final_message", "chat_template_kwargs")  # fmt: skip
TOKENIZE_PROPERTIES: dict[str, Schema] = {
    "model": _SHARED["model"],
    "prompt": _string("A text; or messages."),
    "add_special_tokens": _boolean("Begin with BOS where the model wants it; for a text.", default=True),
    "return_token_strs": _boolean("The tokens' texts too."),
    **{name: CHAT_PROPERTIES[name] for name in _CHAT_TOKENS},
}
DETOKENIZE_PROPERTIES: dict[str, Schema] = {
    "model": _SHARED["model"],
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}, "description": "Token ids."},
}


def _extra(properties: dict[str, Schema], required: str | None) -> dict[str, Any]:
    nullable = {name: schema if name == required else _nullable(schema) for name, schema in properties.items()}
    schema = {"type": "object", "properties": nullable, "required": [] if required is None else [required]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _nullable(schema: Schema) -> Schema:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


COMPLETION_EXTRA = _extra(COMPLETION_PROPERTIES, "prompt")
CHAT_EXTRA = _extra(CHAT_PROPERTIES, "messages")
MODEL_EXTRA: dict[str, Any] = {
    "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
}
RESPONSES_EXTRA = _extra(RESPONSES_PROPERTIES, "input")
TOKENIZE_EXTRA = _extra(TOKENIZE_PROPERTIES, None)
DETOKENIZE_EXTRA = _extra(DETOKENIZE_PROPERTIES, "tokens")
EMBEDDING_EXTRA = _extra(EMBEDDING_PROPERTIES, "input")
