"""The arithmetic of the reference executor: each function is one op's definition, in float64 numpy.

Owns formulas; must not know plans, slots or caches. Arrays are float64 unless said otherwise.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from yeoul.ops.vocabulary import Activation
from yeoul.types import RopeSpec

Array = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]
ACTIVATION_GROUP = 32
"""Consecutive values that share one scale when activations are quantized."""


def quantize_activations(x: Array) -> Array:
    """x [rows, dim] after a round trip through int8 per 32 consecutive values, as the native executor does it.

    Per group: d = max|x| / 127 in float32, q = round-half-even(x * (127 / max|x|)) in float32, value = q * d (exact).
    """
    groups = x.astype(np.float32).reshape(len(x), x.shape[1] // ACTIVATION_GROUP, ACTIVATION_GROUP)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    d = largest / np.float32(127)
    inverse = np.float32(127) / np.where(largest > 0, largest, np.float32(np.inf))
    # A group that is zero, or so small that its inverse is infinite, becomes zero; a NaN stays one.
    q = np.clip(np.rint(groups * np.where(np.isfinite(inverse), inverse, np.float32(0))), -127, 127)
    return np.asarray(q.astype(np.float64) * d).reshape(x.shape)


def rms_norm(x: Array, weight: Array, eps: float, heads: int) -> Array:
    """x [rows, dim] over `heads` equal parts; weight [dim / heads]."""
    parts: Array = x.reshape(len(x), heads, x.shape[1] // heads)
    scale = 1 / np.sqrt(np.mean(parts * parts, axis=-1, keepdims=True) + eps)
    return np.asarray(parts * scale * weight).reshape(x.shape)


def rope(x: Array, positions: Positions, spec: RopeSpec) -> Array:
    """x [rows, heads x head_size], positions int [rows]."""
    out = x.reshape(len(x), x.shape[1] // spec.head_size, spec.head_size).copy()
    half = len(spec.frequencies)
    angles = positions[:, None, None] * np.asarray(spec.frequencies, np.float64)
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if spec.interleaved else _halves(half)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first] = a * np.cos(angles) - b * np.sin(angles)
    out[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return out.reshape(x.shape)


def _halves(half: int) -> tuple[slice, slice]:
    return slice(0, half), slice(half, 2 * half)


def gated(x: Array, activation: Activation) -> Array:
    """act(gate) x up, for x [rows, 2 x dim] = gate | up."""
    gate, up = np.split(x, 2, axis=-1)
    if activation is Activation.SILU:
        return np.asarray(gate / (1 + np.exp(-gate)) * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return np.asarray(0.5 * gate * (1 + np.tanh(inner)) * up)


def attend(q: Array, keys: Array, values: Array, scale: float) -> Array:
    """One query over the keys that it sees: q [heads, key], keys [n, kv_heads, key], values [n, kv_heads, value].

    Returns [heads, value]. Query head h reads KV head h // (heads // kv_heads).
    """
    kv_heads = keys.shape[1]
    grouped = q.reshape(kv_heads, -1, q.shape[-1])
    scores: Array = grouped @ keys.transpose(1, 2, 0) * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: Array = weights @ values.transpose(1, 0, 2) / weights.sum(axis=-1, keepdims=True)
    return out.reshape(len(q), -1)
