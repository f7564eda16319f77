"""Footprint: the bytes that the native executor takes for a model, before it takes them.

Owns the list of what is taken; the sums are those of lowering and layout, which the executor itself uses. Must not
know KV pools (`kv/sizing` has them) nor read any weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from yeoul.exec.lowering import check_heads, lay_out_arena, packed_sizes
from yeoul.models.model import Model
from yeoul.ops import vocabulary as v
from yeoul.ops.passes import fuse

FLOAT_BYTES = 4
LOGIT_ROWS = 32
"""Rows of logits that exist at one time (kLogitRows of native/program.h)."""


@dataclass(frozen=True)
class Footprint:
    """Bytes, by use. The logits and the rope tables are committed page by page as they are touched."""

    packed: Mapping[str, int]
    """Each matrix in the kernels' layout, by the tensor's name; a tied one once."""
    vectors: Mapping[str, int]
    """Norms and biases, as float32."""
    arena: int
    """Activations of the largest step."""
    logits: int
    rope: int

    @property
    def weights(self) -> int:
        """Matrices and vectors."""
        return sum(self.packed.values()) + sum(self.vectors.values())

    @property
    def total(self) -> int:
        """All but the KV pool."""
        return self.weights + self.arena + self.logits + self.rope


def footprint(model: Model, *, max_tokens: int, max_positions: int) -> Footprint:
    """For steps of at most `max_tokens` tokens and sequences of `max_positions`.

    Raises UnsupportedModelError for what the kernels cannot run.
    """
    program = fuse(model.program)
    check_heads(program)
    ropes = {op.rope for op in program.ops if isinstance(op, v.Rope)}
    return Footprint(
        packed=packed_sizes(program, model.weights),
        vectors={name: FLOAT_BYTES * model.weights[name].shape[0] for name in _vectors(program)},
        arena=lay_out_arena(program, model.weights, max_tokens).num_bytes,
        logits=LOGIT_ROWS * program.head.out.dim * FLOAT_BYTES,
        rope=sum(max_positions * rope.rotary_dim * FLOAT_BYTES for rope in ropes),
    )


def _vectors(program: v.Program) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for op in program.ops:
        if isinstance(op, v.RMSNorm):
            names[op.weight] = None
        elif isinstance(op, v.Linear):
            names.update(dict.fromkeys(segment.bias for segment in op.segments if segment.bias is not None))
    return tuple(names)
