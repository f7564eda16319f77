"""Tiny random models of every family, written as real GGUF files: `tiny_model(folder, family, **overrides) -> Path`.

Owns what such a file holds (metadata, tokenizer, tensors in any encoding). Must not import yeoul: the oracles are made
from these files by other libraries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np
from tiny_text import CHATML, GEMMA_TURNS, Vocabulary, byte_level, sentencepiece

FAMILIES = ("llama", "qwen2", "gemma3")
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class Tiny:
    """What a tiny model is made of. Any field can be overridden in `tiny_model`."""

    family: str = "llama"
    seed: int = 0
    layers: int = 2
    hidden: int = 64
    ffn: int = 160
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    """Explicit: not hidden / heads."""
    vocab: int = 384
    context: int = 1024
    eps: float = 1e-5
    rope_base: float = 10000.0
    rope_factors: tuple[float, ...] | None = None
    """head_dim / 2 divisors of the frequencies, written as the tensor `rope_freqs.weight`."""
    window: int = 0
    """Sliding window of the local layers (gemma3) or of all layers (llama); 0: none."""
    pattern: int = 0
    """gemma3: every pattern-th layer is global; 0: the key is not written, as in real files (then it is 6)."""
    tied: bool = True
    bias: tuple[str, ...] = ()
    """Linear layers with a bias, e.g. ("attn_q", "ffn_down")."""
    weight_type: str = "Q4_1"
    weight_types: Mapping[str, str] = field(default_factory=dict)
    """Encoding by tensor, e.g. {"attn_v": "Q8_0", "blk.1.ffn_down": "Q6_K"}; the longest matching key wins."""
    chat_template: str | None = CHATML
    name: str = "Tiny"
    metadata: Mapping[str, object] = field(default_factory=dict)
    """More metadata (int, float, bool, str or list), e.g. {"llama.rope.scaling.type": "yarn"}; replaces none."""
    omit: tuple[str, ...] = ()
    """Tensors to leave out."""
    extra: tuple[str, ...] = ()
    """Tensors [hidden] to add, which no model uses."""


PRESETS = {
    "llama": Tiny(weight_types={"token_embd": "Q8_0"}),
    "qwen2": Tiny(
        family="qwen2",
        kv_heads=1,
        head_dim=16,
        eps=1e-6,
        rope_base=1e6,
        tied=False,
        bias=("attn_q", "attn_k", "attn_v"),
        weight_type="Q5_0",
        weight_types={"attn_v": "Q8_0", "output": "Q8_0", "attn_output": "Q4_0"},
    ),
    "gemma3": Tiny(
        family="gemma3",
        layers=6,
        ffn=96,
        kv_heads=1,
        vocab=448,
        eps=1e-6,
        rope_base=1e6,
        window=32,
        weight_type="Q5_0",
        weight_types={"attn_v": "Q8_0", "token_embd": "Q8_0", "attn_output": "Q4_1"},
        chat_template=GEMMA_TURNS,
    ),
}
K_SIZES: Mapping[str, object] = {"hidden": 256, "ffn": 512, "head_dim": 64, "weight_type": "Q4_K"}
"""Overrides for a model of K-quants: `tiny_model(folder, "qwen2", **K_SIZES, weight_types={"ffn_down": "Q6_K"})`."""


def tiny_model(folder: Path, family: str = "llama", **overrides: object) -> Path:
    """Write a model and return its path. Equal arguments give equal files."""
    tiny = replace(PRESETS[family], **overrides)
    path = folder / f"tiny-{family}-{tiny.seed}.gguf"
    writer = gguf.GGUFWriter(path, family)
    _write_metadata(writer, tiny)
    _write_tokenizer(writer, vocabulary(tiny), tiny.chat_template)
    for name, data in _tensors(tiny).items():
        if name not in tiny.omit:
            _write_tensor(writer, tiny, name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary(tiny: Tiny) -> Vocabulary:
    if tiny.family == "gemma3":
        return sentencepiece(tiny.vocab)
    return byte_level("smollm" if tiny.family == "llama" else "qwen2", tiny.vocab)


def _write_metadata(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    writer.add_name(tiny.name)
    writer.add_block_count(tiny.layers)
    writer.add_context_length(tiny.context)
    writer.add_embedding_length(tiny.hidden)
    writer.add_feed_forward_length(tiny.ffn)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    writer.add_layer_norm_rms_eps(tiny.eps)
    writer.add_rope_freq_base(tiny.rope_base)
    if tiny.window:
        writer.add_sliding_window(tiny.window)
    if tiny.pattern:
        writer.add_uint32(f"{tiny.family}.attention.sliding_window_pattern", tiny.pattern)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[list] = writer.add_array
    for key, value in tiny.metadata.items():
        add[type(value)](key, value)


def _write_tokenizer(writer: gguf.GGUFWriter, vocab: Vocabulary, chat_template: str | None) -> None:
    writer.add_tokenizer_model(vocab.model)
    writer.add_tokenizer_pre(vocab.pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    if vocab.merges is not None:
        writer.add_token_merges(vocab.merges)
    if vocab.scores is not None:
        writer.add_token_scores(vocab.scores)
    if vocab.unknown is not None:
        writer.add_unk_token_id(vocab.unknown)
    writer.add_bos_token_id(vocab.bos)
    writer.add_eos_token_id(vocab.eos)
    writer.add_pad_token_id(vocab.pad)
    writer.add_add_bos_token(vocab.add_bos)
    if vocab.model == "llama":
        writer.add_add_space_prefix(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _tensors(tiny: Tiny) -> dict[str, np.ndarray]:
    """Every tensor in float32, [rows, columns], in the file's order. Scaled so that activations stay near one.

    The embedding is small and the last norm large: otherwise a tied model would only repeat its last token.
    """
    rng = np.random.default_rng(tiny.seed)
    out = {"token_embd.weight": _normal(rng, tiny.vocab, tiny.hidden) * np.float32(0.05)}
    if not tiny.tied:
        out["output.weight"] = _matrix(rng, tiny.vocab, tiny.hidden) * np.float32(0.5)
    out["output_norm.weight"] = _norm(rng, tiny.hidden) * np.float32(6)
    if tiny.rope_factors is not None:
        out["rope_freqs.weight"] = np.array(tiny.rope_factors, np.float32)
    for layer in range(tiny.layers):
        for name, data in _layer(tiny, rng).items():
            out[f"blk.{layer}.{name}"] = data
    out.update({name: _norm(rng, tiny.hidden) for name in tiny.extra})
    return out


def _layer(tiny: Tiny, rng: np.random.Generator) -> dict[str, np.ndarray]:
    q, kv = tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim
    shapes = {
        "attn_q": (q, tiny.hidden),
        "attn_k": (kv, tiny.hidden),
        "attn_v": (kv, tiny.hidden),
        "attn_output": (tiny.hidden, q),
        "ffn_gate": (tiny.ffn, tiny.hidden),
        "ffn_up": (tiny.ffn, tiny.hidden),
        "ffn_down": (tiny.hidden, tiny.ffn),
    }
    norms = {"attn_norm": tiny.hidden, "ffn_norm": tiny.hidden}
    if tiny.family == "gemma3":
        norms |= {"attn_q_norm": tiny.head_dim, "attn_k_norm": tiny.head_dim}
        norms |= {"post_attention_norm": tiny.hidden, "post_ffw_norm": tiny.hidden}
    out = {f"{name}.weight": _norm(rng, size) for name, size in norms.items()}
    for name, (rows, columns) in shapes.items():
        out[f"{name}.weight"] = _matrix(rng, rows, columns)
        if name in tiny.bias:
            out[f"{name}.bias"] = _normal(rng, rows) * np.float32(0.5)
    return out


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return _normal(rng, rows, columns) / np.float32(columns**0.5)


def _norm(rng: np.random.Generator, size: int) -> np.ndarray:
    return 1 + _normal(rng, size) * np.float32(0.2)


def _write_tensor(writer: gguf.GGUFWriter, tiny: Tiny, name: str, data: np.ndarray) -> None:
    if data.ndim == 1:
        writer.add_tensor(name, data)
        return
    stem = name.removesuffix(".weight")
    matches = [key for key in tiny.weight_types if stem == key or stem.endswith("." + key)]
    kind = tiny.weight_types[max(matches, key=len)] if matches else tiny.weight_type
    encoding = gguf.GGMLQuantizationType[kind]
    if kind == "F16":
        writer.add_tensor(name, data.astype(np.float16))
    elif kind == "F32":
        writer.add_tensor(name, data)
    elif kind in K_QUANTS:
        rng = np.random.default_rng([tiny.seed, *name.encode()])
        blocks = random_k_blocks(rng, kind, data.size // 256, float(data.std()))
        writer.add_tensor(name, blocks.reshape(data.shape[0], -1), raw_dtype=encoding)
    else:
        writer.add_tensor(name, gguf.quants.quantize(data, encoding), raw_dtype=encoding)


def random_k_blocks(rng: np.random.Generator, kind: str, count: int, std: float) -> np.ndarray:
    """`count` valid random K-quant blocks of 256 weights with mean near 0 and about this deviation: uint8 [count, n].

    gguf-py cannot quantize to these types; random blocks use every bit of the format, which a quantizer might not.
    """

    def raw(n: int) -> np.ndarray:
        return rng.integers(0, 256, (count, n), dtype=np.uint8)

    def f16(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float16).reshape(count, 1).view(np.uint8)

    spread = rng.uniform(0.9, 1.1, count)
    if kind == "Q6_K":
        scales = rng.integers(-128, 128, (count, 16)).astype(np.int8)
        return np.concatenate([raw(128), raw(64), scales.view(np.uint8), f16(spread * std / 1365)], axis=1)
    top = 15 if kind == "Q4_K" else 31
    scales = rng.integers(1, 64, (count, 8))
    mins = np.clip(scales + rng.integers(-2, 3, scales.shape), 0, 63)
    d = spread * std / (37 * top / 3.4)
    high = [raw(32)] if kind == "Q5_K" else []
    return np.concatenate([f16(d), f16(d * top / 2), _pack_scales(scales, mins), *high, raw(128)], axis=1)


def _pack_scales(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """Eight 6-bit scales and eight 6-bit mins in 12 bytes, as Q4_K and Q5_K hold them."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = mins[:, :4] | (mins[:, 4:] >> 4) << 6
    third = (scales[:, 4:] & 15) | (mins[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1).astype(np.uint8)
