"""The sampling fields of both generating endpoints. Owns their names, types and ranges on the wire; must not know
prompts, streaming or answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from yeoul.server.wire.fields import Fields, kind
from yeoul.server.wire.parse import show
from yeoul.server.wire.structured import read_structured
from yeoul.types import (
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_SEQUENCES_PER_REQUEST,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

MAX_INT = 2**31 - 1
NO_DEFAULTS: Mapping[str, int | float] = MappingProxyType({})
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def read_sampling(
    fields: Fields,
    *,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    defaults: Mapping[str, int | float] = NO_DEFAULTS,
) -> SamplingParams:
    """The sampling fields. Raises RequestError naming the field for anything out of range.

    `defaults`: values of fields that the request leaves out, where they are not SamplingParams's own.
    """
    given: dict[str, Any] = {
        "temperature": fields.number("temperature", 0.0, 1e6),
        "top_p": fields.number("top_p", 0.0, 1.0),
        "top_k": fields.integer("top_k", -1, MAX_INT),
        "min_p": fields.number("min_p", 0.0, 1.0),
        "seed": fields.integer("seed", -(2**63), 2**63 - 1),
        "n": fields.integer("n", 1, MAX_SEQUENCES_PER_REQUEST),
        "ignore_eos": fields.boolean("ignore_eos"),
        "structured": read_structured(fields),
        **_read_edits(fields, vocab_size),
        **_read_ends(fields, vocab_size),
    }
    given = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


def _read_edits(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """What changes logits."""
    return {
        "frequency_penalty": fields.number("frequency_penalty", -2.0, 2.0),
        "presence_penalty": fields.number("presence_penalty", -2.0, 2.0),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100.0),
        "logit_bias": read_logit_bias(fields, vocab_size),
        "allowed_token_ids": fields.token_ids("allowed_token_ids", vocab_size, vocab_size),
        "bad_words": _read_texts(fields, "bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_BYTES),
    }


def _read_ends(fields: Fields, vocab_size: int) -> dict[str, Any]:
    """What ends a reply and how the end is shown."""
    return {
        "min_tokens": fields.integer("min_tokens", 0, MAX_INT),
        "stop": read_stop(fields),
        "stop_token_ids": fields.token_ids("stop_token_ids", vocab_size, MAX_STOP_TOKEN_IDS),
        "include_stop_str_in_output": fields.boolean("include_stop_str_in_output"),
        "skip_special_tokens": fields.boolean("skip_special_tokens", True),
    }


def read_stop(fields: Fields) -> tuple[str, ...] | None:
    """`stop`: a string or a list of up to 16 (OpenAI allows 4), each of 1 to 256 bytes."""
    value = fields.take("stop")
    return None if value is None else _texts(fields, "stop", value, MAX_STOP_STRINGS, MAX_STOP_BYTES)


def _read_texts(fields: Fields, name: str, most: int, most_bytes: int) -> tuple[str, ...] | None:
    value = fields.take(name)
    if value is None:
        return None
    if isinstance(value, str):
        fields.refuse(name, "must be a list of strings, got a string")
    return _texts(fields, name, value, most, most_bytes)


def _texts(fields: Fields, name: str, value: object, most: int, most_bytes: int) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        fields.refuse(name, f"must be a string or a list of strings, got {kind(value)}")
    if len(value) > most:
        fields.refuse(name, f"has {len(value)} strings; at most {most} are allowed")
    for index, text in enumerate(value):
        if not isinstance(text, str):
            fields.refuse(name, f"must hold strings, got {kind(text)} at {index}")
        if not 1 <= len(text.encode()) <= most_bytes:
            fields.refuse(name, f"holds a string of {len(text.encode())} bytes; 1 to {most_bytes} are allowed")
    return tuple(value)


def read_logit_bias(fields: Fields, vocab_size: int) -> dict[int, float] | None:
    """`logit_bias`: {"token id": -100 .. 100}, at most 300 entries."""
    value = fields.take("logit_bias")
    if value is None:
        return None
    if not isinstance(value, dict):
        fields.refuse("logit_bias", f"must be an object, got {kind(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        fields.refuse("logit_bias", f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    return {_bias_id(fields, name, vocab_size): _bias(fields, name, bias) for name, bias in value.items()}


def _bias_id(fields: Fields, name: str, vocab_size: int) -> int:
    if not _TOKEN_ID.fullmatch(name):
        fields.refuse("logit_bias", f"has the key {show(name)}, which is no token id")
    if int(name) >= vocab_size:
        fields.refuse("logit_bias", f"has token id {name}; the model has 0 to {vocab_size - 1}")
    return int(name)


def _bias(fields: Fields, name: str, bias: object) -> float:
    if isinstance(bias, bool) or not isinstance(bias, (int, float)):
        fields.refuse("logit_bias", f"must hold numbers, got {kind(bias)} for {name}")
    if not -100 <= bias <= 100:
        fields.refuse("logit_bias", f"must hold numbers between -100 and 100, got {show(bias)} for {name}")
    return float(bias)
