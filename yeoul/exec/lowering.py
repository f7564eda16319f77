"""Lowering: from a Program to the native core's list of kernel calls.

Owns which op becomes which call, when inputs are quantized, and the packing of weights. Must not know plans, slots or
sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from yeoul import _native
from yeoul.errors import UnsupportedModelError
from yeoul.exec.layout import NOWHERE, Layout, View, lay_out
from yeoul.ops import vocabulary as v
from yeoul.types import RopeSpec
from yeoul.weights.dequant import dequantize
from yeoul.weights.tensor import BLOCKS, Tensor

ACTIVATIONS: Mapping[v.Activation, int] = MappingProxyType({v.Activation.SILU: 0, v.Activation.GELU_TANH: 1})
MAX_HEAD_SIZE = 512
"""Of the native attention kernel."""


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines of every position, float32 [positions, 2 x pairs]; filled on demand, committed when touched."""

    spec: RopeSpec
    table: np.ndarray

    def fill(self, first: int, end: int) -> None:
        """Compute rows first .. end - 1: angles in float64 from the float32 frequencies, rounded once."""
        angles = np.arange(first, end)[:, None] * np.array(self.spec.frequencies, np.float32).astype(np.float64)
        half = len(self.spec.frequencies)
        self.table[first:end, :half] = np.cos(angles)
        self.table[first:end, half:] = np.sin(angles)


class PackedWeights:
    """The matrices that a program multiplies with, laid out for the kernels in one arena."""

    def __init__(self, program: v.Program, tensors: Mapping[str, Tensor], pool: _native.Pool) -> None:
        sizes = packed_sizes(program, tensors)
        self.num_bytes = sum(sizes.values())
        self._arena = _native.WeightArena(self.num_bytes)
        self._packed = {name: self._pack(tensors[name], pool) for name in sizes}

    def __getitem__(self, name: str) -> _native.PackedWeight:
        return self._packed[name]

    def _pack(self, tensor: Tensor, pool: _native.Pool) -> _native.PackedWeight:
        rows, columns = tensor.shape
        return _native.pack(tensor.type, rows, columns, tensor.data, self._arena, pool)


def packed_sizes(program: v.Program, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes that each matrix of the program takes once it is packed, by name."""
    names = dict.fromkeys(name for op in program.ops for name in _matrices(op))
    return {name: _native.packed_bytes(tensors[name].type, *tensors[name].shape) for name in names}


def _matrices(op: v.Op) -> tuple[str, ...]:
    if isinstance(op, v.Linear):
        return tuple(segment.weight for segment in op.segments)
    return (op.weight,) if isinstance(op, v.Embed | v.Logits) else ()


def is_quantized(tensor: Tensor) -> bool:
    """Are activations that meet this matrix quantized to int8?"""
    return BLOCKS[tensor.type].values > 1


def lay_out_arena(program: v.Program, tensors: Mapping[str, Tensor], max_tokens: int) -> Layout:
    """Where the program's values lie in steps of at most `max_tokens` tokens."""

    def wants_q8(op: v.Op) -> bool:
        return any(is_quantized(tensors[name]) for name in _matrices(op))

    return lay_out(program, max_tokens, wants_q8)


class Lowering:
    """One program's way into a `_native.Program`. Raises UnsupportedModelError for what the kernels cannot do."""

    def __init__(
        self,
        program: v.Program,
        tensors: Mapping[str, Tensor],
        weights: PackedWeights,
        *,
        max_tokens: int,
        max_positions: int,
    ) -> None:
        self._program = program
        self._tensors = tensors
        self._weights = weights
        self._max_positions = max_positions
        self._layout: Layout = lay_out_arena(program, tensors, max_tokens)
        self._place = {
            layer: (g, i) for g, (_, layers) in enumerate(program.kv_groups) for i, layer in enumerate(layers)
        }
        self._ropes: dict[RopeSpec, RopeTable] = {}
        self._spans: list[tuple[int, int]] = []
        check_heads(program)

    @property
    def ropes(self) -> tuple[RopeTable, ...]:
        """The tables that the program reads; whoever runs it fills them as far as positions go."""
        return tuple(self._ropes.values())

    @property
    def arena_bytes(self) -> int:
        """Bytes of activations that the program needs."""
        return self._layout.num_bytes

    @property
    def program(self) -> v.Program:
        """What is lowered."""
        return self._program

    @property
    def layout(self) -> Layout:
        """Where its values lie."""
        return self._layout

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """For each op, the calls [first, last) that `emit` made of it; none for a view."""
        return tuple(self._spans)

    def emit(self, native: _native.Program) -> None:
        """Append all calls."""
        for index, op in enumerate(self._program.ops):
            first = len(native)
            if isinstance(op, v.Linear | v.Logits) and self._layout.quantized_at.get(op.x.id) == index:
                native.quantize(self._view(op.x), self._q8(op.x))
            RULES[type(op)](self, op, native)
            self._spans.append((first, len(native)))

    def _view(self, value: v.Value) -> View:
        return self._layout.views[value.id]

    def _q8(self, value: v.Value) -> View:
        return self._layout.q8.get(value.id, NOWHERE)

    def _vector(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(dequantize(self._tensors[name]), np.float32)

    def _segment(self, segment: v.Segment) -> tuple[_native.PackedWeight, np.ndarray | None]:
        return self._weights[segment.weight], None if segment.bias is None else self._vector(segment.bias)

    def _embed(self, op: v.Embed, native: _native.Program) -> None:
        native.embed(self._weights[op.weight], self._view(op.out))

    def _rms_norm(self, op: v.RMSNorm, native: _native.Program) -> None:
        native.rms_norm(self._view(op.x), self._view(op.out), self._vector(op.weight), op.eps, op.heads)

    def _linear(self, op: v.Linear, native: _native.Program) -> None:
        x, q8, out = self._view(op.x), self._q8(op.x), self._view(op.out)
        segments = [self._segment(segment) for segment in op.segments]
        residual = None if op.residual is None else self._view(op.residual)
        if op.glu is None:
            native.linear(x, q8, out, segments, residual)
        else:
            gate, up = segments
            native.gated_linear(x, q8, out, gate, up, ACTIVATIONS[op.glu])

    def _slice(self, op: v.Slice, native: _native.Program) -> None:
        """A view costs nothing."""

    def _rope(self, op: v.Rope, native: _native.Program) -> None:
        if op.rope not in self._ropes:
            shape = (self._max_positions, op.rope.rotary_dim)
            self._ropes[op.rope] = RopeTable(op.rope, np.empty(shape, np.float32))
        table = self._ropes[op.rope].table
        native.rope(self._view(op.x), self._view(op.out), op.rope.head_size, table, op.rope.interleaved)

    def _attention(self, op: v.Attention, native: _native.Program) -> None:
        group, index = self._place[op.layer]
        q, k, value, out = (self._view(value) for value in (op.q, op.k, op.v, op.out))
        native.attention(q, k, value, out, group, index, op.scale, op.k_scale, op.v_scale)

    def _gated(self, op: v.GatedActivation, native: _native.Program) -> None:
        native.gated(self._view(op.x), self._view(op.out), ACTIVATIONS[op.activation])

    def _add(self, op: v.Add, native: _native.Program) -> None:
        native.add(self._view(op.a), self._view(op.b), self._view(op.out))

    def _scale(self, op: v.Scale, native: _native.Program) -> None:
        native.scale(self._view(op.x), self._view(op.out), op.factor)

    def _gather_rows(self, op: v.GatherRows, native: _native.Program) -> None:
        native.gather(self._view(op.x), self._view(op.out))

    def _logits(self, op: v.Logits, native: _native.Program) -> None:
        native.logits(self._view(op.x), self._q8(op.x), self._weights[op.weight])


RULES: Mapping[type[v.Op], Callable[..., None]] = MappingProxyType(
    {
        v.Embed: Lowering._embed,
        v.RMSNorm: Lowering._rms_norm,
        v.Linear: Lowering._linear,
        v.Slice: Lowering._slice,
        v.Rope: Lowering._rope,
        v.Attention: Lowering._attention,
        v.GatedActivation: Lowering._gated,
        v.Add: Lowering._add,
        v.Scale: Lowering._scale,
        v.GatherRows: Lowering._gather_rows,
        v.Logits: Lowering._logits,
    }
)


def check_heads(program: v.Program) -> None:
    """Raises UnsupportedModelError for attention heads that the kernels cannot run."""
    for spec in program.kv_specs:
        if max(spec.key_size, spec.value_size) > MAX_HEAD_SIZE:
            raise UnsupportedModelError(
                f"attention heads of {spec.key_size} values are over the limit of {MAX_HEAD_SIZE}"
            )
