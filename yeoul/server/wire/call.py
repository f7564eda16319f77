"""What both generating endpoints share: sampling fields, streaming options, the model's name, usage. Owns the fields
that completions and chat read in the same way; must not know their prompts or the shapes of their answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from yeoul.errors import ModelNotServedError
from yeoul.server.wire.fields import Fields, kind
from yeoul.server.wire.parse import show
from yeoul.types import MAX_SEQUENCES_PER_REQUEST, MAX_STOP_BYTES, MAX_STOP_STRINGS, SamplingParams, SequenceTimes

MAX_INT = 2**31 - 1
TIME_PARTS = ("queue", "prefill", "decode", "stalled", "preempted")
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Accepted at any value and without effect: they concern the hosted service, not the reply."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "detokenize": (True,),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "priority": (0,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
"""Fields of OpenAI's and vLLM's APIs that are known and not supported yet, with the values that change nothing."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One checked request of either endpoint, before its text is tokenized."""

    model: str
    """The name the client used; the answer repeats it."""
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False


class Usage(msgspec.Struct):
    """Token counts of one answer. Prompts count once each, whatever n is."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    times: SequenceTimes | None = None
    """Of the sequence that ended last."""

    def to_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def timings(self) -> dict[str, Any] | None:
        """The `timings` object, seconds rounded to microseconds; None where no sequence came to its end."""
        times = self.times
        if times is None:
            return None
        parts = {name: round(getattr(times, name), 6) for name in TIME_PARTS}
        speed = times.tokens_per_second
        return {
            **parts,
            "total": round(times.total, 6),
            "cached_tokens": self.cached_tokens,
            "tokens_per_second": None if speed is None else round(speed, 2),
        }


def read_model(fields: Fields, served: tuple[str, ...]) -> str:
    """The requested model's name; absent means the first one. Raises ModelNotServedError (404) for another."""
    name = fields.string("model")
    if name is None:
        return served[0]
    if name not in served:
        raise model_not_served(name, served)
    return name


def model_not_served(name: str, served: tuple[str, ...]) -> ModelNotServedError:
    """The 404 for a model that is not there."""
    return ModelNotServedError(
        f"the model {show(name)} is not served here", hint=f"this server has {', '.join(served)}", param="model"
    )


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """(stream, include_usage). `stream_options` without `stream` is refused, as OpenAI's documentation says."""
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        fields.refuse("stream_options", "is only allowed when stream is true")
    include_usage = options.boolean("include_usage")
    options.neutral({"include_obfuscation": (False,), "continuous_usage_stats": (False,)})
    options.refuse_rest()
    return stream, include_usage


def read_sampling(fields: Fields, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The sampling fields. Raises RequestError naming the field for anything out of range."""
    given: dict[str, Any] = {
        "temperature": fields.number("temperature", 0.0, 1e6),
        "top_p": fields.number("top_p", 0.0, 1.0),
        "top_k": fields.integer("top_k", -1, MAX_INT),
        "min_p": fields.number("min_p", 0.0, 1.0),
        "seed": fields.integer("seed", -(2**63), 2**63 - 1),
        "n": fields.integer("n", 1, MAX_SEQUENCES_PER_REQUEST),
        "stop": read_stop(fields),
    }
    given = {name: value for name, value in given.items() if value is not None}
    ignore_eos = fields.boolean("ignore_eos")
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, ignore_eos=ignore_eos, **given)


def read_stop(fields: Fields) -> tuple[str, ...] | None:
    """`stop`: a string or a list of up to 16 (OpenAI allows 4), each of 1 to 256 bytes."""
    value = fields.take("stop")
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        fields.refuse("stop", f"must be a string or a list of strings, got {kind(value)}")
    if len(value) > MAX_STOP_STRINGS:
        fields.refuse("stop", f"has {len(value)} strings; at most {MAX_STOP_STRINGS} are allowed")
    for index, text in enumerate(value):
        if not isinstance(text, str):
            fields.refuse("stop", f"must hold strings, got {kind(text)} at {index}")
        if not 1 <= len(text.encode()) <= MAX_STOP_BYTES:
            fields.refuse("stop", f"holds a string of {len(text.encode())} bytes; 1 to {MAX_STOP_BYTES} are allowed")
    return tuple(value)


def finish_fields(fields: Fields, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Judge what is left: ignored fields, unsupported ones at neutral values, then unknown names."""
    fields.ignore(IGNORED)
    fields.neutral(NEUTRAL)
    fields.neutral(neutral)
    fields.refuse_rest()
