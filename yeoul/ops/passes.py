"""Passes: functions from Program to Program that change how much is done in one op, never what is computed.

Own the rewriting of programs; must not know any model family or executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, replace

from yeoul.ops import vocabulary as v


def fuse(program: v.Program) -> v.Program:
    """Put gate/up + activation, and a residual addition, into the linear op before them.

    Linear + GatedActivation -> Linear(glu), Linear + Add -> Linear(residual), each only where nobody else reads the
    linear's result. The fused op takes the place of the second one, so its inputs are always defined before it.
    """
    counts = Counter(value.id for op in program.ops for value in inputs(op))
    ops: dict[int, v.Op] = {}
    for op in program.ops:
        merged, linear = _merge(op, ops, counts)
        if linear is not None:
            del ops[linear.out.id]
        ops[merged.out.id] = merged
    return renumber(ops.values())


def inputs(op: v.Op) -> tuple[v.Value, ...]:
    """The values that an op reads, in the order of its fields."""
    values = (getattr(op, field.name) for field in fields(op) if field.name != "out")
    return tuple(value for value in values if isinstance(value, v.Value))


def renumber(ops: Iterable[v.Op]) -> v.Program:
    """A program whose value ids ascend from 0 in order of definition. Raises ValueError for a use before definition."""
    new: dict[int, v.Value] = {}
    out: list[v.Op] = []
    for op in ops:
        missing = [value.id for value in inputs(op) if value.id not in new]
        if missing:
            raise ValueError(f"op {type(op).__name__} reads values {missing} that are not defined before it")
        changed = _with_inputs(op, new)
        defined = replace(op.out, id=len(out))
        new[op.out.id] = defined
        out.append(replace(changed, out=defined))
    return v.Program(tuple(out))


def _with_inputs(op: v.Op, new: dict[int, v.Value]) -> v.Op:
    pairs = ((field.name, getattr(op, field.name)) for field in fields(op) if field.name != "out")
    return replace(op, **{name: new[value.id] for name, value in pairs if isinstance(value, v.Value)})


def _merge(op: v.Op, ops: dict[int, v.Op], counts: Counter[int]) -> tuple[v.Op, v.Linear | None]:
    """The op with the linear op before it folded in, and that linear; the op itself and None where that cannot be."""
    if isinstance(op, v.GatedActivation):
        linear = ops[op.x.id]
        if isinstance(linear, v.Linear) and _is_gate_up(linear) and counts[op.x.id] == 1:
            return replace(linear, out=op.out, glu=op.activation), linear
    if isinstance(op, v.Add):
        for product, residual in ((op.b, op.a), (op.a, op.b)):
            linear = ops[product.id]
            if isinstance(linear, v.Linear) and _is_plain(linear) and counts[product.id] == 1:
                return replace(linear, out=op.out, residual=residual), linear
    return op, None


def _is_gate_up(linear: v.Linear) -> bool:
    sizes = [segment.size for segment in linear.segments]
    return len(sizes) == 2 and sizes[0] == sizes[1] and _is_plain(linear)


def _is_plain(linear: v.Linear) -> bool:
    return linear.glu is None and linear.residual is None
