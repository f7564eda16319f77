"""What the stored oracles cover, and how they are stored: shared by their maker and by the test that reads them.

Must not import yeoul or torch.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tiny import K_SIZES

FOLDER = Path(__file__).parent / "data" / "oracle"
NUM_TOP = 24
"""Likeliest tokens stored for each position."""
NUM_RANDOM = 16
"""Token ids, the same for all positions, whose log-probabilities are stored too."""


@dataclass(frozen=True)
class TinyCase:
    """A tiny model (`tiny_model(folder, family, **overrides)`) beside the transformers config it corresponds to."""

    family: str
    model_type: str
    overrides: Mapping[str, object]
    config: Mapping[str, object]
    """Options of the transformers config that the overrides stand for, beyond sizes."""
    num_tokens: int = 100


def llama3_divisors(dim: int, base: float, factor: float, original: int) -> tuple[float, ...]:
    """What converters write as `rope_freqs.weight` for Llama 3's scaling with low 1 and high 4."""
    out = []
    for i in range(dim // 2):
        length = 2 * math.pi * base ** (2 * i / dim)
        if length > original:
            out.append(factor)
        elif length < original / 4:
            out.append(1.0)
        else:
            smooth = (original / length - 1) / 3
            out.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(out)


ROPE3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE3_METADATA = {
    "llama.rope.scaling.type": "llama3",
    "llama.rope.scaling.factor": 8.0,
    "llama.rope.scaling.low_freq_factor": 1.0,
    "llama.rope.scaling.high_freq_factor": 4.0,
    "llama.rope.scaling.original_context_length": 64,
}
ALL_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}

TINY_CASES: Mapping[str, TinyCase] = {
    "llama": TinyCase("llama", "llama", {}, {}),
    "llama-rope-freqs": TinyCase(
        "llama",
        "llama",
        {"seed": 1, "rope_factors": llama3_divisors(32, 10000.0, 8.0, 64), "tied": False},
        {"rope": ROPE3 | {"original_max_position_embeddings": 64}},
    ),
    "llama-rope-metadata": TinyCase(
        "llama",
        "llama",
        {"seed": 2, "metadata": ROPE3_METADATA, "weight_type": "F16"},
        {"rope": ROPE3 | {"original_max_position_embeddings": 64}},
    ),
    "llama-linear": TinyCase(
        "llama", "llama", {"seed": 3, "metadata": LINEAR}, {"rope": {"rope_type": "linear", "factor": 4.0}}
    ),
    "llama-biases": TinyCase(
        "llama", "llama", {"seed": 4, "bias": ALL_BIASES}, {"attention_bias": True, "mlp_bias": True}
    ),
    "mistral-window": TinyCase("llama", "mistral", {"seed": 5, "window": 32}, {"sliding_window": 32}),
    "qwen2": TinyCase("qwen2", "qwen2", {}, {}),
    "qwen2-k-quants": TinyCase(
        "qwen2", "qwen2", {**K_SIZES, "seed": 1, "weight_types": {"ffn_down": "Q6_K", "attn_v": "Q5_K"}}, {}
    ),
    "gemma3": TinyCase("gemma3", "gemma3_text", {}, {"sliding_window": 32}),
    "gemma3-pattern": TinyCase(
        "gemma3", "gemma3_text", {"seed": 1, "layers": 4, "pattern": 2}, {"sliding_window": 32, "pattern": 2}
    ),
}

REAL_MODELS: Mapping[str, int] = {
    "smollm2-135m": 320,
    "gemma3-270m": 560,
    "qwen2.5-coder-0.5b": 320,
    "qwen2.5-coder-1.5b": 320,
}
"""Catalogue name, and how many tokens of text: Gemma's reach past its window of 512."""


def tiny_tokens(case: TinyCase, vocab: int) -> list[int]:
    rng = np.random.default_rng(len(case.overrides) + case.num_tokens)
    return rng.integers(0, vocab, case.num_tokens).tolist()


def fingerprint(tensors: Iterable[tuple[str, np.ndarray]]) -> str:
    """Of a model's tensors, (name, bytes): shows whether an oracle belongs to the file at hand."""
    digest = hashlib.sha256()
    for name, data in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(name.encode() + hashlib.sha256(data.tobytes()).digest())
    return digest.hexdigest()


@dataclass(frozen=True)
class Oracle:
    """Log-probabilities at some positions of one text."""

    tokens: np.ndarray
    """int [n]."""
    positions: np.ndarray
    """int [p]: where the following token's distribution is known."""
    top_ids: np.ndarray
    """int [p, NUM_TOP]."""
    random_ids: np.ndarray
    """int [NUM_RANDOM]."""
    logprobs: np.ndarray
    """float32 [p, NUM_TOP + NUM_RANDOM]."""
    model: str
    """Fingerprint."""

    @classmethod
    def of(cls, tokens: list[int], positions: np.ndarray, logprobs: np.ndarray, model: str) -> "Oracle":
        """From the log-probabilities [p, vocab] of the positions."""
        top = np.argsort(-logprobs, axis=1, kind="stable")[:, :NUM_TOP]
        some = np.random.default_rng(0).integers(0, logprobs.shape[1], NUM_RANDOM)
        values = np.concatenate([np.take_along_axis(logprobs, top, 1), logprobs[:, some]], axis=1)
        return cls(np.array(tokens), positions, top, some, values.astype(np.float32), model)

    def save(self, name: str) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        kept = {field: getattr(self, field) for field in self.__dataclass_fields__}
        ids = ("tokens", "positions", "top_ids", "random_ids")
        kept |= {field: kept[field].astype(np.uint32) for field in ids}
        np.savez_compressed(FOLDER / f"{name}.npz", **kept)

    @classmethod
    def load(cls, name: str) -> "Oracle":
        with np.load(FOLDER / f"{name}.npz") as stored:
            fields = {field: stored[field] for field in cls.__dataclass_fields__}
        ids = ("tokens", "positions", "top_ids", "random_ids")
        fields |= {field: fields[field].astype(np.int64) for field in ids}
        return cls(**{**fields, "model": str(fields["model"])})

    def prefix(self, num_tokens: int | None) -> "Oracle":
        """What it says of the first `num_tokens` tokens (all: None)."""
        kept = self.positions < (len(self.tokens) if num_tokens is None else num_tokens)
        parts = {field: getattr(self, field)[kept] for field in ("positions", "top_ids", "logprobs")}
        return replace(self, tokens=self.tokens[:num_tokens], **parts)

    def difference(self, logprobs: np.ndarray) -> float:
        """Largest difference to log-probabilities [p, vocab] of the stored positions."""
        rows = np.arange(len(self.positions))[:, None]
        ids = np.concatenate([self.top_ids, np.broadcast_to(self.random_ids, (len(rows), NUM_RANDOM))], axis=1)
        return float(np.abs(logprobs[rows, ids] - self.logprobs).max())
