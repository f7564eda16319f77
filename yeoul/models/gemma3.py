"""Gemma 3 (text): local and global attention layers, norms before and after each part, per-head q and k norms.

Owns this architecture's wiring and the facts that its files leave out: every 6th layer is global, local layers rotate
with base 10,000, the embedding is scaled by sqrt(hidden). Must not know how ops run.

Norm weights in GGUF already include the "+1" of the original. The scale is exact here, as in a float32 run of the
original code (which rounds it to the dtype of its weights: 25.25 instead of 25.298 for bfloat16 and hidden size 640).
"""

from __future__ import annotations

from collections.abc import Sequence

from yeoul.errors import UnsupportedModelError
from yeoul.models.checkpoint import Checkpoint
from yeoul.models.common import base_frequencies, float32, output_weight, rope_spec
from yeoul.models.llama import feed_forward, qkv
from yeoul.ops.builder import Builder
from yeoul.ops.vocabulary import Activation, Program, Value
from yeoul.types import ModelSpec, RopeSpec

PATTERN = 6
LOCAL_ROPE_BASE = 10000.0
LAYERS_OF_27B = 62


def gemma3(file: Checkpoint, spec: ModelSpec, b: Builder) -> Program:
    """The decoder of a `gemma3` file. Raises ModelFileError for a tensor that is missing or of another shape."""
    hidden = spec.hidden_size
    eps = file.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1)
    window = file.integer("attention.sliding_window", 1, 1 << 24)
    global_rope = rope_spec(file, spec, interleaved=False)
    local_rope = _local_rope(file, spec)
    x = b.embed(file.weight("token_embd.weight", spec.vocab_size, hidden), hidden)
    x = b.scale(x, hidden**0.5)
    for layer, local in enumerate(_local_layers(file, spec)):
        blk = f"blk.{layer}"
        h = b.rms_norm(x, file.weight(f"{blk}.attn_norm.weight", hidden), eps)
        h = _attention(file, spec, b, h, blk, local_rope if local else global_rope, window if local else 0)
        x = b.add(x, b.rms_norm(h, file.weight(f"{blk}.post_attention_norm.weight", hidden), eps))
        h = b.rms_norm(x, file.weight(f"{blk}.ffn_norm.weight", hidden), eps)
        h = feed_forward(file, spec, b, h, blk, Activation.GELU_TANH)
        x = b.add(x, b.rms_norm(h, file.weight(f"{blk}.post_ffw_norm.weight", hidden), eps))
    x = b.rms_norm(b.gather_rows(x), file.weight("output_norm.weight", hidden), eps)
    return b.logits(x, output_weight(file, spec), spec.vocab_size)


def _attention(file: Checkpoint, spec: ModelSpec, b: Builder, x: Value, blk: str, rope: RopeSpec, window: int) -> Value:
    eps = file.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1)
    q, k, v = qkv(file, spec, b, x, blk)
    q = b.rms_norm(q, file.weight(f"{blk}.attn_q_norm.weight", spec.head_size), eps, heads=spec.num_heads)
    k = b.rms_norm(k, file.weight(f"{blk}.attn_k_norm.weight", spec.head_size), eps, heads=spec.num_kv_heads)
    scale = _attention_scale(file, spec)
    h = b.attention(b.rope(q, rope), b.rope(k, rope), v, num_kv_heads=spec.num_kv_heads, scale=scale, window=window)
    out = file.segment(f"{blk}.attn_output", spec.hidden_size, h.dim)
    return b.linear(h, f"{blk}.attn_output", [out])


def _attention_scale(file: Checkpoint, spec: ModelSpec) -> float:
    """1 / sqrt(query_pre_attn_scalar), which GGUF does not hold: the head size, but hidden / heads in the 27B model."""
    of_27b = spec.num_layers == LAYERS_OF_27B
    scalar = spec.hidden_size / spec.num_heads if of_27b else float(spec.head_size)
    return file.number("attention.scale", 1e-6, 1e3, default=scalar**-0.5)


def _local_rope(file: Checkpoint, spec: ModelSpec) -> RopeSpec:
    """Local layers never scale their frequencies."""
    base = file.number("rope.freq_base_swa", 1.0, 1e12, default=LOCAL_ROPE_BASE)
    return RopeSpec(spec.head_size, float32(base_frequencies(base, spec.head_size)), interleaved=False)


def _local_layers(file: Checkpoint, spec: ModelSpec) -> Sequence[bool]:
    """Which layers are local: all but every 6th, unless the file says otherwise (a period, or a flag per layer)."""
    key = "attention.sliding_window_pattern"
    value = file.metadata.get(f"{file.architecture}.{key}", PATTERN)
    if isinstance(value, int):
        period = file.integer(key, 1, spec.num_layers + 1, default=PATTERN)
        return [(layer + 1) % period != 0 for layer in range(spec.num_layers)]
    raise UnsupportedModelError(
        f"gemma3.{key} = {value!r:.60}", hint="a number is expected: every n-th layer is global"
    )
