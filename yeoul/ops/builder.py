"""Builder: what a model file writes a Program with. Owns shapes and value ids; must not know weights' contents."""

from __future__ import annotations

from collections.abc import Sequence

from yeoul.ops import vocabulary as v
from yeoul.types import KVKind, KVSpec, RopeSpec


class Builder:
    """Collects ops; each method appends one and returns the value it defines. Runs once, at load.

    Shape mistakes are programming errors of a model file and raise ValueError.
    """

    def __init__(
        self, k_dtype: str = "f16", v_dtype: str = "f16", kv_scales: Sequence[tuple[float, float]] = ()
    ) -> None:
        """`kv_scales`: each layer's static scales of keys and values, for fp8 caches; empty: all 1."""
        self._ops: list[v.Op] = []
        self._layers = 0
        self._k_dtype = k_dtype
        self._v_dtype = v_dtype
        self._kv_scales = kv_scales

    def embed(self, weight: str, dim: int) -> v.Value:
        """Rows of `weight` [vocab, dim] for the tokens: [T, dim]."""
        return self._emit(v.Embed(self._value(v.Rows.T, dim), weight))

    def rms_norm(self, x: v.Value, weight: str, eps: float, heads: int = 1) -> v.Value:
        """Normalize each of `heads` equal parts of every row."""
        if x.dim % heads:
            raise ValueError(f"rms_norm {weight}: {x.dim} columns do not divide into {heads} heads")
        return self._emit(v.RMSNorm(self._value(x.rows, x.dim), x, weight, eps, heads))

    def linear(self, x: v.Value, site: str, segments: Sequence[v.Segment]) -> v.Value:
        """The segments' products with x, side by side."""
        out = self._value(x.rows, sum(segment.size for segment in segments))
        return self._emit(v.Linear(out, x, site, tuple(segments)))

    def split(self, x: v.Value, sizes: Sequence[int]) -> list[v.Value]:
        """Views of consecutive columns."""
        if sum(sizes) != x.dim:
            raise ValueError(f"split of {x.dim} columns into {list(sizes)}")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            self._emit(v.Slice(self._value(x.rows, size), x, start)) for start, size in zip(starts, sizes, strict=True)
        ]

    def rope(self, x: v.Value, rope: RopeSpec) -> v.Value:
        """Rotate every head at the tokens' positions."""
        if x.dim % rope.head_size:
            raise ValueError(f"rope: {x.dim} columns do not divide into heads of {rope.head_size}")
        return self._emit(v.Rope(self._value(x.rows, x.dim), x, rope))

    def attention(
        self, q: v.Value, k: v.Value, value: v.Value, *, num_kv_heads: int, scale: float, window: int = 0
    ) -> v.Value:
        """`window` 0: full attention. Layers number themselves in the order of these calls."""
        key_size, value_size = k.dim // num_kv_heads, value.dim // num_kv_heads
        if q.dim % key_size or (q.dim // key_size) % num_kv_heads:
            raise ValueError(f"attention: q of {q.dim} columns does not fit {num_kv_heads} KV heads of {key_size}")
        kind = KVKind.WINDOW if window else KVKind.FULL
        spec = KVSpec(kind, num_kv_heads, key_size, value_size, self._k_dtype, self._v_dtype, window)
        out = self._value(q.rows, q.dim // key_size * value_size)
        k_scale, v_scale = self._kv_scales[self._layers] if self._kv_scales else (1.0, 1.0)
        op = v.Attention(out, q, k, value, self._layers, spec, scale, k_scale, v_scale)
        self._layers += 1
        return self._emit(op)

    def gated(self, x: v.Value, activation: v.Activation) -> v.Value:
        """act(left half) x right half: [rows, dim / 2]."""
        return self._emit(v.GatedActivation(self._value(x.rows, x.dim // 2), x, activation))

    def add(self, a: v.Value, b: v.Value) -> v.Value:
        """a + b, of equal shapes."""
        if (a.rows, a.dim) != (b.rows, b.dim):
            raise ValueError(f"add: {a} and {b}")
        return self._emit(v.Add(self._value(a.rows, a.dim), a, b))

    def scale(self, x: v.Value, factor: float) -> v.Value:
        """x times a constant."""
        return self._emit(v.Scale(self._value(x.rows, x.dim), x, factor))

    def gather_rows(self, x: v.Value) -> v.Value:
        """The rows whose logits are wanted: [R, dim]."""
        return self._emit(v.GatherRows(self._value(v.Rows.R, x.dim), x))

    def logits(self, x: v.Value, weight: str, vocab_size: int) -> v.Program:
        """Close the program."""
        if x.rows is not v.Rows.R:
            raise ValueError("logits are computed of gathered rows only")
        self._emit(v.Logits(self._value(v.Rows.R, vocab_size), x, weight))
        return v.Program(tuple(self._ops))

    def _value(self, rows: v.Rows, dim: int) -> v.Value:
        return v.Value(len(self._ops), rows, dim)

    def _emit(self, op: v.Op) -> v.Value:
        self._ops.append(op)
        return op.out
