"""What both generating endpoints share: queueing and streaming options, the model's name, usage. Owns the fields
that completions and chat read in the same way; must not know their prompts or the shapes of their answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from yeoul.errors import ModelNotServedError
from yeoul.server.wire.fields import Fields
from yeoul.server.wire.parse import show
from yeoul.types import SamplingParams, SequenceTimes

MAX_INT = 2**31 - 1
CACHE_SALT = re.compile(r"[A-Za-z0-9._-]{1,128}")
TIME_PARTS = ("queue", "prefill", "decode", "stalled", "preempted")
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Accepted at any value and without effect: they concern the hosted service, not the reply."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "detokenize": (True,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
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
    continuous_usage: bool = False
    """Every chunk has the token counts so far."""
    return_token_ids: bool = False
    echo: bool = False
    """The answer begins with the prompt."""
    priority: int = 0
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    """Only so many of the prompt's last tokens are used."""


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


def read_delivery(fields: Fields) -> dict[str, Any]:
    """Call's fields that say how the request is queued and how its answer is sent."""
    stream = fields.boolean("stream")
    include_usage, continuous_usage = _read_stream_options(fields, stream)
    return {
        "stream": stream,
        "include_usage": include_usage,
        "continuous_usage": continuous_usage,
        "return_token_ids": fields.boolean("return_token_ids"),
        "priority": fields.integer("priority", -MAX_INT - 1, MAX_INT) or 0,
        "cache_salt": read_salt(fields),
        "truncate_prompt_tokens": fields.integer("truncate_prompt_tokens", 1, MAX_INT),
    }


def _read_stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """(include_usage, continuous_usage_stats). Refused without `stream`, as OpenAI's documentation says."""
    options = fields.object("stream_options")
    if options is None:
        return False, False
    if not stream:
        fields.refuse("stream_options", "is only allowed when stream is true")
    include_usage = options.boolean("include_usage")
    continuous = options.boolean("continuous_usage_stats")
    if continuous and not include_usage:
        options.refuse("continuous_usage_stats", "needs include_usage to be true")
    options.neutral({"include_obfuscation": (False,)})
    options.refuse_rest()
    return include_usage, continuous


def read_salt(fields: Fields) -> str | None:
    """`cache_salt`: 1 to 128 characters."""
    salt = fields.string("cache_salt")
    if salt is not None and not CACHE_SALT.fullmatch(salt):
        fields.refuse("cache_salt", "must be 1 to 128 letters, digits, dots, underscores or dashes")
    return salt


def finish_fields(fields: Fields, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Judge what is left: ignored fields, unsupported ones at neutral values, then unknown names."""
    fields.ignore(IGNORED)
    fields.neutral(NEUTRAL)
    fields.neutral(neutral)
    fields.refuse_rest()
