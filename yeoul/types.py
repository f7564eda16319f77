"""Frozen data that crosses rooms: what a request asks for, what it gets back, and the shape of a model and of its KV.

Owns the fields and their ranges. Must not know how anything is scheduled, computed, stored or sent: it imports the
standard library, msgspec and the exception tree only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from yeoul.errors import RequestError

MAX_SEQUENCES_PER_REQUEST = 8
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_GRAMMAR_BYTES = 64 << 10
MAX_REGEX_BYTES = 1 << 10


class FinishReason(StrEnum):
    """Why a sequence ended. STOP: an end token or a stop string; LENGTH: max_tokens or the context's end."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Pooling(StrEnum):
    """How the hidden states of a prompt become one vector."""

    LAST = "last"
    MEAN = "mean"


class StructuredKind(StrEnum):
    """How `Structured.source` is read. JSON: a JSON schema; CHOICE: a JSON array of texts; GRAMMAR: Lark."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


class Structured(msgspec.Struct, frozen=True):
    """A form that the output must have. Raises RequestError for a source that is too long."""

    kind: StructuredKind
    source: str
    param: str = "structured"
    """The field that it came with, for errors."""

    def __post_init__(self) -> None:
        most = MAX_REGEX_BYTES if self.kind is StructuredKind.REGEX else MAX_GRAMMAR_BYTES
        size = len(self.source.encode("utf-8", "surrogatepass"))
        if not 0 < size <= most:
            raise RequestError(f"the {self.kind} has {size} bytes; 1 to {most} are allowed", param=self.param)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one request is sampled. Neutral values switch a filter off: top_p 1, top_k 0, min_p 0.

    Logits are edited first, in this order: repetition penalty, frequency and presence penalty, logit_bias; then what
    is banned (min_tokens, allowed_token_ids, bad_words) is taken out. Filters act on the result in this order:
    temperature, min_p, top_k, top_p. Temperature 0 (or one so low that it makes no difference) is greedy; ties go to
    the lowest id. An unseeded request gets a seed at admission.

    Raises RequestError, naming the field, for any value out of range.
    """

    max_tokens: int | None = 16
    """Most tokens to generate for each sequence; None: the rest of the context. 0: the prompt is only computed."""
    min_tokens: int = 0
    """No end token, stop token or stop string ends the output before it has this many tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it was generated."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that was generated."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of all tokens in prompt or output, once (Keskar et al., 2019)."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these token ids, after the penalties."""
    allowed_token_ids: tuple[int, ...] | None = None
    """None: all. Otherwise no other token is generated."""
    bad_words: tuple[str, ...] = ()
    """Words that are not generated: their token sequences, alone and after a space, are never completed."""
    structured: Structured | None = None
    """The output's form; it ends where nothing may follow."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """More tokens that end the output, whatever ignore_eos says; like an end token they count and are not shown."""
    include_stop_str_in_output: bool = False
    """Show the stop string, or the text of the stop token, that ended the output."""
    skip_special_tokens: bool = True
    """Leave tokens that have no text of their own out of the text; False: show their names."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities. k: the chosen token's and those of the k most likely ones (0 <= k <= 20)."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, over max_tokens {self.max_tokens}", param="min_tokens"
            )
        _check_float("temperature", self.temperature, 0.0, 1e6)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        _check_int("n", self.n, 1, MAX_SEQUENCES_PER_REQUEST)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _check_texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_BYTES)
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_BYTES)
        self._check_edits()

    def _check_edits(self) -> None:
        """What changes logits."""
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0, 2**31 - 1)
            _check_float("logit_bias", bias, -100.0, 100.0)
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("allowed_token_ids", self.allowed_token_ids or ())):
            for token_id in ids:
                _check_int(name, token_id, 0, 2**31 - 1)
        if self.allowed_token_ids == ():
            raise RequestError("allowed_token_ids is empty: nothing could be generated", param="allowed_token_ids")
        if self.structured is not None and self.min_tokens:
            raise RequestError("min_tokens cannot be combined with structured output", param="min_tokens")

    @property
    def edits_logits(self) -> bool:
        """Whether anything stands between logits and filters."""
        penalized = self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1
        banned = self.min_tokens > 0 or self.allowed_token_ids is not None or bool(self.bad_words)
        return penalized or banned or bool(self.logit_bias)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"{name} has {count} entries; at most {most} are allowed", param=name)


def _check_texts(name: str, texts: tuple[str, ...], most: int, most_bytes: int) -> None:
    _check_count(name, len(texts), most)
    for text in texts:
        if not text:
            raise RequestError(f"{name} must not hold empty strings", param=name)
        if len(text.encode("utf-8", "surrogatepass")) > most_bytes:
            raise RequestError(f"{name} holds a string of more than {most_bytes} bytes", param=name)


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
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """The token sequences of `params.bad_words`."""
    pooling: Pooling | None = None
    """An embedding is wanted: the last hidden states, pooled. Goes with max_tokens 0."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability (natural logarithm, of the unmodified distribution) of one token, and the likeliest others."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), descending, ties by ascending id; `SamplingParams.logprobs` entries."""


class SequenceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sequence's time went, in seconds from its arrival in the engine to its last token. The parts sum to
    `total`; engine/timeline.py says what belongs to which."""

    queue: float
    """Until its first step."""
    prefill: float
    """In steps that computed its prompt, up to the first token."""
    decode: float
    """In steps that computed its later tokens."""
    stalled: float
    """The shares of those steps that went into other requests' prompts."""
    preempted: float
    """Back in the queue, or computing again what was lost."""
    tokens_per_second: float | None = None
    """Of the tokens after the first; None for one token."""

    @property
    def total(self) -> float:
        """End to end."""
        return self.queue + self.prefill + self.decode + self.stalled + self.preempted


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
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens but the first, in the sequence's first output, where they were asked for."""
    pooled: bytes = b""
    """The sum of the pooled hidden states, float64 little-endian, where `Request.pooling` asks for it."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """One line for the client, when finish_reason is ERROR."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """Generated so far by this sequence, including the end token."""
    num_cached_tokens: int = 0
    """Prompt tokens that the request found in the prefix cache when it started."""
    times: SequenceTimes | None = None
    """With the last output of a sequence that was not cut off."""


class KVKind(StrEnum):
    """How long a layer's keys and values live."""

    FULL = "full"
    WINDOW = "window"


class KVDtype(msgspec.Struct, frozen=True):
    """How the KV cache stores a number: bytes of a value, and of the scale that a token has in every head."""

    value_bytes: int
    scale_bytes: int = 0


KV_DTYPES: Mapping[str, KVDtype] = MappingProxyType(
    {
        "f16": KVDtype(2),
        "f32": KVDtype(4),
        "bf16": KVDtype(2),
        "int8": KVDtype(1, 2),
        "fp8_e4m3": KVDtype(1),
        "fp8_e5m2": KVDtype(1),
    }
)


class KVSpec(msgspec.Struct, frozen=True):
    """Shape and lifetime of one attention layer's KV. Layers with equal specs form a KV group.

    `k_dtype`, `v_dtype`: names in KV_DTYPES.
    """

    kind: KVKind
    num_kv_heads: int
    key_size: int
    value_size: int
    k_dtype: str = "f16"
    v_dtype: str = "f16"
    window: int = 0
    """WINDOW: a token at position p sees positions p - window + 1 .. p. 0 for FULL."""

    def token_bytes(self) -> int:
        """Bytes of one token in one layer, scales included. Raises ValueError for a dtype that is not in KV_DTYPES."""
        return self.num_kv_heads * (
            _head_bytes(self.k_dtype, self.key_size) + _head_bytes(self.v_dtype, self.value_size)
        )


def _head_bytes(dtype: str, size: int) -> int:
    stored = KV_DTYPES.get(dtype)
    if stored is None:
        raise ValueError(f"unknown KV dtype {dtype!r}")
    return size * stored.value_bytes + stored.scale_bytes


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
        """Leading dims of a head that rotate."""
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
