"""/v1/embeddings: its fields and its answer. Must not know the tokenizer, the engine or HTTP."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

from yeoul.server.errors import GenerationError
from yeoul.server.wire.call import MAX_INT, Call, Usage, read_model, read_salt
from yeoul.server.wire.completions import read_prompts
from yeoul.server.wire.fields import Fields
from yeoul.server.wire.parse import show
from yeoul.types import Pooling, SamplingParams

Vector: TypeAlias = "array[float]"
"""Of the type code f: float32."""
ENCODINGS = ("float", "base64")
IGNORED = ("user",)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dimensions": (),
    "add_special_tokens": (True,),
    "normalize": (True,),
    "additional_data": (),
}


class EmbeddingCall(Call, frozen=True, kw_only=True):
    """A checked embeddings request: each input is a text, or token ids below the vocabulary's size."""

    inputs: tuple[str | list[int], ...]
    pooling: Pooling
    is_base64: bool


def parse_embedding(
    members: dict[str, Any], *, served: tuple[str, ...], vocab_size: int, max_inputs: int
) -> EmbeddingCall:
    """Check an embeddings body. Raises RequestError or ModelNotServedError, naming the field."""
    fields = Fields(members)
    call = EmbeddingCall(
        model=read_model(fields, served),
        params=SamplingParams(max_tokens=0),
        inputs=tuple(read_prompts(fields, "input", vocab_size, max_inputs)),
        pooling=Pooling(_choice(fields, "pooling", tuple(Pooling), Pooling.LAST)),
        is_base64=_choice(fields, "encoding_format", ENCODINGS, "float") == "base64",
        priority=fields.integer("priority", -MAX_INT - 1, MAX_INT) or 0,
        cache_salt=read_salt(fields),
        truncate_prompt_tokens=fields.integer("truncate_prompt_tokens", 1, MAX_INT),
    )
    fields.ignore(IGNORED)
    fields.neutral(NEUTRAL)
    fields.refuse_rest()
    return call


def _choice(fields: Fields, name: str, choices: Sequence[str], default: str) -> str:
    value = fields.string(name)
    if value is not None and value not in choices:
        fields.refuse(name, f"must be one of {', '.join(choices)}, got {show(value)}")
    return default if value is None else value


def unit_vector(pooled: bytes) -> Vector:
    """float32 [hidden] of length one, from a float64 sum of hidden states (a mean differs from it in length only).

    Raises GenerationError where there is no direction.
    """
    total = array("d", pooled)
    if sys.byteorder == "big":
        total.byteswap()
    length = math.hypot(*total)
    if not length > 0:
        raise GenerationError("the model's output for this input is zero")
    return array("f", [value / length for value in total])


def embedding_body(call: EmbeddingCall, vectors: Sequence[Vector], usage: Usage) -> dict[str, Any]:
    """The answer: one entry per input, in order."""
    data = [
        {"object": "embedding", "index": index, "embedding": _encode(vector, call.is_base64)}
        for index, vector in enumerate(vectors)
    ]
    counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return {"object": "list", "data": data, "model": call.model, "usage": counts}


def _encode(vector: Vector, is_base64: bool) -> str | list[float]:
    """base64: of the little-endian float32 values."""
    if not is_base64:
        return vector.tolist()
    values = vector[:]
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()
