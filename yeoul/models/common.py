"""What the decoder families share: sizes from the metadata, rotary frequencies, the output matrix.

Must not know how any single family wires its layers.
"""

from __future__ import annotations

import math
import struct

from yeoul.errors import ModelFileError, UnsupportedModelError
from yeoul.models.checkpoint import Checkpoint
from yeoul.types import ModelSpec, RopeSpec
from yeoul.weights.tensor import Tensor, TensorType

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
"""Most columns of any value but the logits."""
MAX_HEAD_SIZE = 1024

NEUTRAL: tuple[tuple[str, bool | int | float], ...] = (
    ("expert_count", 0),
    ("logit_scale", 1.0),
    ("embedding_scale", 1.0),
    ("residual_scale", 1.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("attention.causal", True),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("use_parallel_residual", False),
)
"""Keys that would change what a model computes, with the value at which they do not."""


def read_spec(file: Checkpoint) -> ModelSpec:
    """The sizes, checked. Head size: `attention.key_length`, else hidden / heads; vocabulary: rows of the embedding."""
    for key, neutral in NEUTRAL:
        file.refuse_unless(key, neutral)
    hidden = file.integer("embedding_length", 1, MAX_WIDTH)
    heads = file.integer("attention.head_count", 1, 4096)
    kv_heads = file.integer("attention.head_count_kv", 1, 4096, default=heads)
    return ModelSpec(
        architecture=file.architecture,
        name=_model_name(file),
        num_layers=file.integer("block_count", 1, MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=file.integer("feed_forward_length", 1, MAX_WIDTH),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=_head_size(file, hidden, heads, kv_heads),
        vocab_size=file.rows("token_embd.weight", hidden),
        max_context=file.integer("context_length", 1, 1 << 24),
    )


def output_weight(file: Checkpoint, spec: ModelSpec) -> str:
    """`output.weight`, or the embedding where the file has none (tied, GGUF's rule)."""
    tied = "token_embd.weight"
    return file.optional("output.weight", spec.vocab_size, spec.hidden_size) or tied


def kv_scales(file: Checkpoint, spec: ModelSpec) -> tuple[tuple[float, float], ...]:
    """Each layer's static scales of keys and values for fp8 caches: `attention.k_cache_scales`, `.v_cache_scales`."""
    keys, values = (
        file.numbers(f"attention.{name}_cache_scales", spec.num_layers, 1e-6, 1e6, default=1.0) for name in ("k", "v")
    )
    return tuple(zip(keys, values, strict=True))


def rope_spec(file: Checkpoint, spec: ModelSpec, *, interleaved: bool) -> RopeSpec:
    """Rotary embedding of all layers, or of the global ones, as the file states it.

    Frequency of pair i: base^(-2i / rotary_dim), then scaled: by `rope_freqs.weight` (one divisor per pair, how GGUF
    stores Llama 3's scaling), else by `rope.scaling`: linear (all divided by the factor) or llama3.
    """
    dim = file.integer("rope.dimension_count", 2, spec.head_size, default=spec.head_size)
    if dim % 2:
        raise ModelFileError(f"{file.architecture}.rope.dimension_count must be even, not {dim}")
    frequencies = base_frequencies(file.number("rope.freq_base", 1.0, 1e12, default=10000.0), dim)
    frequencies = _scaled(file, frequencies, spec)
    return RopeSpec(spec.head_size, float32(frequencies), interleaved)


def base_frequencies(base: float, dim: int) -> tuple[float, ...]:
    """base^(-2i / dim) for each of the dim / 2 pairs: radians per position (Su et al., 2021)."""
    return tuple(base ** (-2.0 * i / dim) for i in range(dim // 2))


def float32(values: tuple[float, ...]) -> tuple[float, ...]:
    """Rounded to float32, as every executor holds them."""
    return struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values))


def llama3_frequencies(
    frequencies: tuple[float, ...], *, factor: float, low: float, high: float, original_context: int
) -> tuple[float, ...]:
    """Llama 3's scaling (Llama 3.1 reference code, `apply_scaling`): long waves divided by `factor`, short ones kept.

    Between wavelengths original / high and original / low the divisor is blended linearly in original / wavelength.
    """
    out = []
    for frequency in frequencies:
        waves = original_context * frequency / (2 * math.pi)
        keep = min(max((waves - low) / (high - low), 0.0), 1.0)
        out.append(frequency * (keep + (1 - keep) / factor))
    return tuple(out)


def _model_name(file: Checkpoint) -> str:
    name = file.metadata.get("general.name", file.architecture)
    return name if isinstance(name, str) else file.architecture


def _head_size(file: Checkpoint, hidden: int, heads: int, kv_heads: int) -> int:
    if heads % kv_heads:
        raise ModelFileError(f"{heads} attention heads do not divide into {kv_heads} KV heads")
    if not file.has("attention.key_length") and hidden % heads:
        raise ModelFileError(f"hidden size {hidden} does not divide into {heads} heads, and no key_length is given")
    size = file.integer("attention.key_length", 1, MAX_HEAD_SIZE, default=max(hidden // heads, 1))
    value_size = file.integer("attention.value_length", 1, MAX_HEAD_SIZE, default=size)
    if size != value_size:
        raise UnsupportedModelError(f"heads with keys of {size} and values of {value_size} dimensions")
    if size % 2 or size > MAX_HEAD_SIZE or heads * size > MAX_WIDTH:
        raise ModelFileError(f"{heads} heads of {size} dimensions: the size must be even, at most {MAX_HEAD_SIZE}")
    return size


def _scaled(file: Checkpoint, frequencies: tuple[float, ...], spec: ModelSpec) -> tuple[float, ...]:
    factors = file.optional("rope_freqs.weight", len(frequencies))
    if factors is not None:
        divisors = _float32_values(file.tensors[factors])
        return tuple(f / divisor for f, divisor in zip(frequencies, divisors, strict=True))
    kind = file.text("rope.scaling.type", "none")
    if kind == "none":
        # How old files state a linear scaling.
        divisor = file.number("rope.scale_linear", 1e-6, 1e6, default=1.0)
        return tuple(f / divisor for f in frequencies)
    factor = file.number("rope.scaling.factor", 1e-6, 1e6, default=1.0)
    if kind == "linear":
        return tuple(f / factor for f in frequencies)
    if kind == "llama3":
        return _llama3(file, frequencies, factor, spec)
    raise UnsupportedModelError(
        f"rope scaling of type {kind!r:.40}", hint="Yeoul knows none, linear, llama3 and the tensor rope_freqs.weight"
    )


def _llama3(file: Checkpoint, frequencies: tuple[float, ...], factor: float, spec: ModelSpec) -> tuple[float, ...]:
    low = file.number("rope.scaling.low_freq_factor", 1e-6, 1e6, default=1.0)
    high = file.number("rope.scaling.high_freq_factor", 1e-6, 1e6, default=4.0)
    original = file.integer("rope.scaling.original_context_length", 1, 1 << 24, default=spec.max_context)
    if high <= low:
        raise ModelFileError(f"rope scaling: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
    return llama3_frequencies(frequencies, factor=factor, low=low, high=high, original_context=original)


def _float32_values(tensor: Tensor) -> tuple[float, ...]:
    if tensor.type is not TensorType.F32:
        raise ModelFileError(f"tensor {tensor.name!r} must be F32, not {tensor.type.name}")
    values: tuple[float, ...] = struct.unpack(f"<{tensor.shape[0]}f", tensor.data.tobytes())
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ModelFileError(f"tensor {tensor.name!r} must hold positive numbers")
    return values
