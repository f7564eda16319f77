"""Cost: floating-point operations and bytes of every op, as a function of what a step holds.

Owns the one model of work that planner, roofline, profile and simulator share. Must not know how fast anything is, nor
how any executor stores weights: their bytes are an argument.

Conventions: a multiply-add is 2 operations, exp, tanh and division 1 each; softmax inside attention and the tables of
rotary embeddings are left out, as is usual. Activations are float32; an input of several ops is counted for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from yeoul.ops import vocabulary as v
from yeoul.ops.passes import inputs

if TYPE_CHECKING:
    from yeoul.weights.tensor import Tensor

GATE_FLOPS: Mapping[v.Activation, int] = MappingProxyType({v.Activation.SILU: 5, v.Activation.GELU_TANH: 10})
"""Per output value of act(gate) x up."""
FLOAT_BYTES = 4


@dataclass(frozen=True)
class StepShape:
    """What a step holds: (start position, number of tokens) of each row, and how many rows of logits it wants (R)."""

    rows: tuple[tuple[int, int], ...]
    num_outputs: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(count for _, count in self.rows)


@dataclass(frozen=True)
class WeightSize:
    """A matrix or vector: rows (1 for a vector) and bytes as the executor stores it."""

    rows: int
    bytes: int


@dataclass(frozen=True)
class Cost:
    """Work of an op or a program in one step. Costs add up."""

    flops: int = 0
    weight_bytes: int = 0
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0
    activation_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_write_bytes + other.kv_write_bytes,
            self.activation_bytes + other.activation_bytes,
        )

    @property
    def total_bytes(self) -> int:
        """All bytes moved if nothing stays in a cache."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes


def weight_sizes(weights: Mapping[str, Tensor]) -> dict[str, WeightSize]:
    """Sizes of a file's tensors in the file's own encoding."""
    return {
        name: WeightSize(tensor.shape[0] if len(tensor.shape) > 1 else 1, tensor.data.nbytes)
        for name, tensor in weights.items()
    }


def cost(op: v.Op, weights: Mapping[str, WeightSize], shape: StepShape) -> Cost:
    """Work of one op in a step of this shape. Raises ValueError for an op that this file does not know."""
    rule = RULES.get(type(op))
    if rule is None:
        raise ValueError(f"no cost is known for the op {type(op).__name__}")
    moved = sum(_size(value, shape) for value in (*inputs(op), op.out)) * FLOAT_BYTES
    return Cost(activation_bytes=0 if isinstance(op, v.Slice) else moved) + rule(op, weights, shape)


def program_cost(program: v.Program, weights: Mapping[str, WeightSize], shape: StepShape) -> Cost:
    """Work of one step. A weight that two ops read (a tied embedding) is counted for both."""
    return sum((cost(op, weights, shape) for op in program.ops), Cost())


def visible_keys(start: int, count: int, window: int) -> int:
    """Query-key pairs of a row: each token sees itself and what is before it, at most `window` (0: all) keys."""
    clipped = min(max(start + count - window, 0), count) if window else 0
    growing = count - clipped
    return growing * start + growing * (growing + 1) // 2 + clipped * window


def _size(value: v.Value, shape: StepShape) -> int:
    return _count(value.rows, shape) * value.dim


def _count(rows: v.Rows, shape: StepShape) -> int:
    return shape.num_tokens if rows is v.Rows.T else shape.num_outputs


def _embed(op: v.Embed, weights: Mapping[str, WeightSize], shape: StepShape) -> Cost:
    weight = weights[op.weight]
    return Cost(weight_bytes=weight.bytes // weight.rows * shape.num_tokens)


def _rms_norm(op: v.RMSNorm, weights: Mapping[str, WeightSize], shape: StepShape) -> Cost:
    return Cost(flops=4 * _size(op.out, shape), weight_bytes=weights[op.weight].bytes)


def _linear(op: v.Linear, weights: Mapping[str, WeightSize], shape: StepShape) -> Cost:
    rows = _count(op.out.rows, shape)
    names = [name for part in op.segments for name in (part.weight, part.bias) if name is not None]
    flops = sum(rows * part.size * (2 * op.x.dim + (part.bias is not None)) for part in op.segments)
    if op.glu is not None:
        flops += GATE_FLOPS[op.glu] * _size(op.out, shape)
    if op.residual is not None:
        flops += _size(op.out, shape)
    return Cost(flops=flops, weight_bytes=sum(weights[name].bytes for name in names))


def _rope(op: v.Rope, weights: Mapping[str, WeightSize], shape: StepShape) -> Cost:
    rotated = op.x.dim // op.rope.head_size * op.rope.rotary_dim
    return Cost(flops=3 * rotated * _count(op.out.rows, shape))


def _attention(op: v.Attention, weights: Mapping[str, WeightSize], shape: StepShape) -> Cost:
    kv, per_token = op.kv, op.kv.token_bytes()
    pairs = sum(visible_keys(start, count, kv.window) for start, count in shape.rows)
    heads = op.q.dim // kv.key_size
    # Keys that at least one token of the row sees, each read once per row.
    read = sum(start + count - max(start - kv.window + 1, 0) * bool(kv.window) for start, count in shape.rows if count)
    return Cost(
        flops=2 * pairs * heads * (kv.key_size + kv.value_size),
        kv_read_bytes=read * per_token,
        kv_write_bytes=shape.num_tokens * per_token,
    )


def _gated(op: v.GatedActivation, weights: Mapping[str, WeightSize], shape: StepShape) -> Cost:
    return Cost(flops=GATE_FLOPS[op.activation] * _size(op.out, shape))


def _elementwise(op: v.Op, weights: Mapping[str, WeightSize], shape: StepShape) -> Cost:
    return Cost(flops=_size(op.out, shape))


def _nothing(op: v.Op, weights: Mapping[str, WeightSize], shape: StepShape) -> Cost:
    return Cost()


def _logits(op: v.Logits, weights: Mapping[str, WeightSize], shape: StepShape) -> Cost:
    used = weights[op.weight].bytes if shape.num_outputs else 0
    return Cost(flops=2 * op.x.dim * _size(op.out, shape), weight_bytes=used)


RULES: Mapping[type[v.Op], Callable[[Any, Mapping[str, WeightSize], StepShape], Cost]] = MappingProxyType(
    {
        v.Embed: _embed,
        v.RMSNorm: _rms_norm,
        v.Linear: _linear,
        v.Slice: _nothing,
        v.Rope: _rope,
        v.Attention: _attention,
        v.GatedActivation: _gated,
        v.Add: _elementwise,
        v.Scale: _elementwise,
        v.GatherRows: _nothing,
        v.Logits: _logits,
    }
)
