"""Layout: where every value of a program lies in the native executor's arena.

Owns lifetimes, sharing of memory and offsets. Must not know kernels, weights' contents or plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from yeoul.ops import vocabulary as v
from yeoul.ops.passes import inputs

ALIGN = 64
"""Bytes: a cache line, and the widest vector."""


class View(NamedTuple):
    """Columns of a value: row i begins `offset + i x stride` bytes into the arena. `gathered`: R rows instead of T."""

    offset: int
    stride: int
    dim: int
    gathered: bool


NOWHERE = View(0, 0, 0, False)


@dataclass(frozen=True)
class Interval:
    """A buffer of `num_bytes` that is needed from op `first` to op `last`, both included."""

    first: int
    last: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """`views`: each value's floats. `q8`: the int8 forms of linear ops' inputs, quantized before op `quantized_at`."""

    views: dict[int, View]
    q8: dict[int, View]
    quantized_at: dict[int, int]
    num_bytes: int


def lay_out(program: v.Program, max_tokens: int, wants_q8: Callable[[v.Op], bool]) -> Layout:
    """Place every value of a program for at most `max_tokens` rows. `wants_q8`: does this op read its `x` quantized?"""
    roots = _roots(program)
    values = {op.out.id: op.out for op in program.ops}
    floats = {
        root: Interval(first, last, max_tokens * _align(4 * values[root].dim))
        for root, (first, last) in _lifetimes(program, roots).items()
    }
    quantized = _quantized_lifetimes(program, wants_q8)
    ints = {x: Interval(first, last, max_tokens * q8_stride(values[x].dim)) for x, (first, last) in quantized.items()}
    offsets, num_bytes = assign([*floats.values(), *ints.values()])
    float_at = dict(zip(floats, offsets[: len(floats)], strict=True))
    int_at = dict(zip(ints, offsets[len(floats) :], strict=True))
    return Layout(
        views=_float_views(program, roots, float_at),
        q8={x: View(at, q8_stride(values[x].dim), values[x].dim, _gathered(values[x])) for x, at in int_at.items()},
        quantized_at={x: first for x, (first, _) in quantized.items()},
        num_bytes=num_bytes,
    )


def q8_stride(dim: int) -> int:
    """Bytes of a quantized row: int8 values, their scales and sums (native/kernels/abi.h)."""
    return _align(dim + dim // 2)


def assign(intervals: Iterable[Interval]) -> tuple[list[int], int]:
    """An offset for each interval, such that those alive together never overlap; and the bytes in all. First fit."""
    intervals = list(intervals)
    offsets = [0] * len(intervals)
    placed: list[int] = []
    for i in sorted(range(len(intervals)), key=lambda i: intervals[i].first):
        placed = [j for j in placed if intervals[j].last >= intervals[i].first]
        at = 0
        for j in sorted(placed, key=lambda j: offsets[j]):
            if at + intervals[i].num_bytes <= offsets[j]:
                break
            at = max(at, offsets[j] + intervals[j].num_bytes)
        offsets[i] = at
        placed.append(i)
    return offsets, max((at + x.num_bytes for at, x in zip(offsets, intervals, strict=True)), default=0)


def _roots(program: v.Program) -> dict[int, int]:
    """The value in whose memory each value lies: a slice in its parent's, a sum in its residual's if that ends there.

    The latter is safe because each element of the residual is read just before its sum is written, as long as the op
    reads nothing else there: other threads still need all of its input.
    """
    roots = {op.out.id: op.out.id for op in program.ops}
    for op in program.ops:
        if isinstance(op, v.Slice):
            roots[op.out.id] = roots[op.x.id]
    last = {root: end for root, (_, end) in _lifetimes(program, roots).items()}
    for index, op in enumerate(program.ops):
        if isinstance(op, v.Linear) and op.residual is not None:
            root = roots[op.residual.id]
            whole = program.ops[root].out.dim == op.out.dim
            if whole and last[root] == index and roots[op.x.id] != root:
                last[root] = last[op.out.id]
                roots = {value: root if held == op.out.id else held for value, held in roots.items()}
    return roots


def _lifetimes(program: v.Program, roots: dict[int, int]) -> dict[int, tuple[int, int]]:
    """First and last op that touch each root. Logits are left out: they have memory of their own."""
    spans: dict[int, tuple[int, int]] = {}
    for index, op in enumerate(program.ops):
        touched = inputs(op) if isinstance(op, v.Logits) else (*inputs(op), op.out)
        for value in touched:
            first, _ = spans.get(roots[value.id], (index, index))
            spans[roots[value.id]] = (first, index)
    return spans


def _quantized_lifetimes(program: v.Program, wants_q8: Callable[[v.Op], bool]) -> dict[int, tuple[int, int]]:
    spans: dict[int, tuple[int, int]] = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, v.Linear | v.Logits) and wants_q8(op):
            first, _ = spans.get(op.x.id, (index, index))
            spans[op.x.id] = (first, index)
    return spans


def _float_views(program: v.Program, roots: dict[int, int], at: dict[int, int]) -> dict[int, View]:
    views: dict[int, View] = {}
    for op in program.ops:
        if isinstance(op, v.Slice):
            parent = views[op.x.id]
            views[op.out.id] = View(parent.offset + 4 * op.start, parent.stride, op.out.dim, parent.gathered)
        elif not isinstance(op, v.Logits):
            views[op.out.id] = View(at[roots[op.out.id]], _align(4 * op.out.dim), op.out.dim, _gathered(op.out))
    return views


def _gathered(value: v.Value) -> bool:
    return value.rows is v.Rows.R


def _align(num_bytes: int) -> int:
    """Up to an odd number of cache lines: rows at a power of two would all lie in the same sets of the cache."""
    return (-(-num_bytes // ALIGN) | 1) * ALIGN
