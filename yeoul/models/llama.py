"""Llama and what shares its shape: SmolLM2, Llama 3 (with its rope scaling), Mistral (optional sliding window).

Owns this architecture's wiring; must not know how ops run. GGUF's converters store the rows of q and k so that rotary
pairs lie side by side, hence `interleaved`.
"""

from __future__ import annotations

from yeoul.models.checkpoint import Checkpoint
from yeoul.models.common import output_weight, rope_spec
from yeoul.ops.builder import Builder
from yeoul.ops.vocabulary import Activation, Program, Value
from yeoul.types import ModelSpec, RopeSpec


def llama(file: Checkpoint, spec: ModelSpec, b: Builder) -> Program:
    """The decoder of a `llama` file. Raises ModelFileError for a tensor that is missing or of another shape."""
    return decoder(file, spec, b, rope_spec(file, spec, interleaved=True))


def decoder(file: Checkpoint, spec: ModelSpec, b: Builder, rope: RopeSpec) -> Program:
    """Pre-norm decoder: attention and a SiLU-gated feed-forward, each added to the residual stream."""
    hidden = spec.hidden_size
    eps = file.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1)
    window = file.integer("attention.sliding_window", 0, 1 << 24, default=0)
    x = b.embed(file.weight("token_embd.weight", spec.vocab_size, hidden), hidden)
    for layer in range(spec.num_layers):
        blk = f"blk.{layer}"
        h = b.rms_norm(x, file.weight(f"{blk}.attn_norm.weight", hidden), eps)
        x = b.add(x, _attention(file, spec, b, h, blk, rope, window))
        h = b.rms_norm(x, file.weight(f"{blk}.ffn_norm.weight", hidden), eps)
        x = b.add(x, feed_forward(file, spec, b, h, blk, Activation.SILU))
    x = b.rms_norm(b.gather_rows(x), file.weight("output_norm.weight", hidden), eps)
    return b.logits(x, output_weight(file, spec), spec.vocab_size)


def _attention(file: Checkpoint, spec: ModelSpec, b: Builder, x: Value, blk: str, rope: RopeSpec, window: int) -> Value:
    q, k, v = qkv(file, spec, b, x, blk)
    scale = file.number("attention.scale", 1e-6, 1e3, default=spec.head_size**-0.5)
    h = b.attention(b.rope(q, rope), b.rope(k, rope), v, num_kv_heads=spec.num_kv_heads, scale=scale, window=window)
    out = file.segment(f"{blk}.attn_output", spec.hidden_size, h.dim)
    return b.linear(h, f"{blk}.attn_output", [out])


def qkv(file: Checkpoint, spec: ModelSpec, b: Builder, x: Value, blk: str) -> list[Value]:
    """Queries, keys and values of x in one linear op."""
    q, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    sizes = {"attn_q": q, "attn_k": kv, "attn_v": kv}
    segments = [file.segment(f"{blk}.{name}", size, x.dim) for name, size in sizes.items()]
    return b.split(b.linear(x, f"{blk}.attn_qkv", segments), list(sizes.values()))


def feed_forward(file: Checkpoint, spec: ModelSpec, b: Builder, x: Value, blk: str, activation: Activation) -> Value:
    """down(act(gate(x)) x up(x))."""
    inner = spec.intermediate_size
    segments = [file.segment(f"{blk}.{name}", inner, x.dim) for name in ("ffn_gate", "ffn_up")]
    h = b.gated(b.linear(x, f"{blk}.ffn_gate_up", segments), activation)
    return b.linear(h, f"{blk}.ffn_down", [file.segment(f"{blk}.ffn_down", x.dim, inner)])
