"""The op vocabulary: every operation that a model may be made of, as frozen data.

Owns what an op means; must not know how any executor computes it. All values are float matrices [rows, dim] whose row
count is symbolic: T (the tokens of the step) or R (the rows that `rows` gathered, 0 <= R <= T). Weights are named as
in GGUF files. An op never changes a value in place: an executor may, where it can prove that nobody looks again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from yeoul.types import KVSpec, RopeSpec


class Rows(StrEnum):
    """Symbolic row count of a value."""

    T = "T"
    R = "R"


@dataclass(frozen=True)
class Value:
    """One result: `id` is unique in a program and ascends with definition."""

    id: int
    rows: Rows
    dim: int


class Activation(StrEnum):
    """act(gate) x up. GELU_TANH is the tanh approximation (Hendrycks and Gimpel, 2016)."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True)
class Segment:
    """A part of a linear op's output: `size` columns, from the weight [size, in] and an optional bias [size]."""

    weight: str
    size: int
    bias: str | None = None


@dataclass(frozen=True)
class Op:
    """Base of all ops. `out` is the value an op defines."""

    out: Value


@dataclass(frozen=True)
class Embed(Op):
    """Row `token_id` of the weight [vocab, dim], for each token of the step."""

    weight: str


@dataclass(frozen=True)
class RMSNorm(Op):
    """x / sqrt(mean(x^2) + eps) x weight (Zhang and Sennrich, 2019), over each of `heads` equal parts of the row.

    The weight [dim / heads] is shared by the heads.
    """

    x: Value
    weight: str
    eps: float
    heads: int = 1


@dataclass(frozen=True)
class Linear(Op):
    """The segments' outputs side by side: out = concat(x @ W_i.T + b_i), then the options that the `fuse` pass sets.

    `site` is a stable name for the place in the model. `glu`: the two segments are gate and up, of equal size, and out
    = act(gate) x up, [rows, size]. `residual`: out = residual + result.
    """

    x: Value
    site: str
    segments: tuple[Segment, ...]
    glu: Activation | None = None
    residual: Value | None = None


@dataclass(frozen=True)
class Slice(Op):
    """Columns start .. start + out.dim - 1 of x: a view."""

    x: Value
    start: int


@dataclass(frozen=True)
class Rope(Op):
    """Rotary embedding (Su et al., 2021) of each head of x at the tokens' positions; dims past rotary_dim pass."""

    x: Value
    rope: RopeSpec


@dataclass(frozen=True)
class Attention(Op):
    """softmax(q k^T x scale) v over the sequence's cached keys, causal; writes this step's k and v to the cache first.

    q [T, heads x key_size], k [T, kv_heads x key_size], v [T, kv_heads x value_size]; query head h reads KV head
    h // (heads // kv_heads). `kv.window` limits what a token sees. `k_scale`, `v_scale`: what the numbers of an
    fp8 cache are multiplied with; other dtypes do not read them.
    """

    q: Value
    k: Value
    v: Value
    layer: int
    kv: KVSpec
    scale: float
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class GatedActivation(Op):
    """act(x[:, :dim]) x x[:, dim:], for x [rows, 2 x dim]."""

    x: Value
    activation: Activation


@dataclass(frozen=True)
class Add(Op):
    """a + b."""

    a: Value
    b: Value


@dataclass(frozen=True)
class Scale(Op):
    """x times a constant."""

    x: Value
    factor: float


@dataclass(frozen=True)
class GatherRows(Op):
    """The rows of x [T, dim] whose logits are wanted: [R, dim]."""

    x: Value


@dataclass(frozen=True)
class Logits(Op):
    """x [R, dim] @ weight[vocab, dim].T. Ends a program; the executor samples from it or returns it."""

    x: Value
    weight: str


@dataclass(frozen=True)
class Program:
    """A model as a flat list of ops in execution order; the last one is Logits."""

    ops: tuple[Op, ...]

    @property
    def head(self) -> Logits:
        """The last op. Raises ValueError for a program that ends otherwise."""
        last = self.ops[-1]
        if not isinstance(last, Logits):
            raise ValueError("the program does not end in logits")
        return last

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """The KVSpec of every attention layer, in layer order."""
        return tuple(op.kv for op in self.ops if isinstance(op, Attention))

    @property
    def kv_scales(self) -> tuple[tuple[float, float], ...]:
        """Static scales of keys and values, by layer."""
        return tuple((op.k_scale, op.v_scale) for op in self.ops if isinstance(op, Attention))

    @property
    def kv_groups(self) -> tuple[tuple[KVSpec, tuple[int, ...]], ...]:
        """Distinct KVSpecs in order of first use, each with its layers: the order of all per-group data."""
        groups: dict[KVSpec, list[int]] = {}
        for layer, spec in enumerate(self.kv_specs):
            groups.setdefault(spec, []).append(layer)
        return tuple((spec, tuple(layers)) for spec, layers in groups.items())
