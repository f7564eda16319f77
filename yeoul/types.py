"""Frozen data that crosses rooms: what a request asks for, what it gets back, and the shape of a model and of its KV.

Owns the fields and their ranges. Must not know how anything is scheduled, computed, stored or sent: it imports the
standard library, msgspec and the exception tree only.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from yeoul.errors import RequestError

MAX_SEQUENCES_PER_REQUEST = 8
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256


class FinishReason(StrEnum):
    """Why a sequence ended. STOP: an end token or a stop string; LENGTH: max_tokens or the context's end."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request is sampled. Neutral values switch a filter off: top_p 1, top_k 0, min_p 0.

    Filters act in this order: temperature, min_p, top_k, top_p. Temperature 0 (or one so low that it makes no
    difference) is greedy; ties go to the lowest id. An unseeded request gets a seed at admission.

    Raises RequestError, naming the field, for any value out of range.
    """

    max_tokens: int | None = 16
    """Most tokens to generate for each sequence; None: the rest of the context."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities. k: the chosen token's and those of the k most likely ones (0 <= k <= 20)."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_float("temperature", self.temperature, 0.0, 1e6)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        _check_int("n", self.n, 1, MAX_SEQUENCES_PER_REQUEST)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop"
            )
        for text in self.stop:
            if not text:
                raise RequestError("stop strings must not be empty", param="stop")
            if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
                raise RequestError(f"a stop string is longer than {MAX_STOP_BYTES} bytes", param="stop")


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}", param=name)


def _check_float(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number", param=name)
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} must be between {low:g} and {high:g}, got {value}", param=name)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the engine takes it: already tokenized, already validated at the edge."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    """Cached prefixes are shared only among requests with the same salt (or none)."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability (natural logarithm, of the unmodified distribution) of one token, and the likeliest others."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), descending, ties by ascending id; `SamplingParams.logprobs` entries."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence delivers at one time. The deltas of a sequence, joined, are its whole output.

    `text` may be empty while `token_ids` is not (half a character, or the start of a stop string, is held back), and
    the other way round at the end. Exactly one output per sequence has a `finish_reason`, and it is the last.
    """

    request_id: str
    index: int
    """Which of the request's n sequences."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    """One line for the client, when finish_reason is ERROR."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """Generated so far by this sequence, including the end token."""
    num_cached_tokens: int = 0
    """Prompt tokens that the request found in the prefix cache when it started."""


class KVKind(StrEnum):
    FULL = "full"
    WINDOW = "window"


class KVSpec(msgspec.Struct, frozen=True):
    """Shape and lifetime of one attention layer's KV. Layers with equal specs form a KV group.

    Bytes of one token in one layer: num_kv_heads x (key_size x bytes(k_dtype) + value_size x bytes(v_dtype)).
    """

    kind: KVKind
    num_kv_heads: int
    key_size: int
    value_size: int
    k_dtype: str = "f16"
    v_dtype: str = "f16"
    window: int = 0
    """WINDOW: a token at position p sees positions p - window + 1 .. p. 0 for FULL."""


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary position embedding: angle of pair i at position p is p x frequencies[i].

    `interleaved`: pairs are (2i, 2i+1), as llama-family GGUF files store q and k; otherwise (i, i + rotary_dim/2).
    `frequencies` are float32 values, computed at load with any scaling (Llama 3, linear) already applied.
    """

    head_size: int
    frequencies: tuple[float, ...]
    interleaved: bool

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.frequencies)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model, as its file states them; family-neutral."""

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    """Width of the logits: every token id is below it."""
    max_context: int
