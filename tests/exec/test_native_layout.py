"""The arena's layout: run on paper, random programs find every value where and as it was written."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kit import opened
from tiny import FAMILIES, tiny_model

from yeoul.exec.layout import ALIGN, Interval, Layout, View, assign, lay_out, q8_stride
from yeoul.ops import vocabulary as v
from yeoul.ops.builder import Builder
from yeoul.ops.passes import fuse, inputs

ROWS = 3
"""Of the arena: T, and R as well."""


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8), st.integers(1, 9)), max_size=25))
def test_intervals_alive_together_do_not_overlap(spans):
    intervals = [Interval(first, first + length, 64 * size) for first, length, size in spans]
    offsets, num_bytes = assign(intervals)
    for i, (a, at) in enumerate(zip(intervals, offsets, strict=True)):
        assert at >= 0
        assert at + a.num_bytes <= num_bytes
        for b, other in list(zip(intervals, offsets, strict=True))[:i]:
            alive_together = a.first <= b.last and b.first <= a.last
            assert not alive_together or at + a.num_bytes <= other or other + b.num_bytes <= at


def test_memory_is_used_again():
    assert assign([Interval(0, 1, 64), Interval(2, 3, 64), Interval(1, 2, 64)]) == ([0, 0, 64], 128)


@st.composite
def programs(draw) -> v.Program:
    """Any mix of ops over values of three widths, in an order that a model file might use."""
    b = Builder()
    values = [b.embed("embed", 64)]

    def pick(*dims: int) -> v.Value:
        return draw(st.sampled_from([value for value in values if value.dim in dims]))

    for index in range(draw(st.integers(3, 14))):
        kind = draw(st.sampled_from(["norm", "linear", "glu", "split", "add", "sum", "scale", "attention"]))
        if kind == "norm":
            values.append(b.rms_norm(pick(32, 64), "norm", 1e-5))
        elif kind == "linear":
            x, sizes = pick(32, 64), draw(st.sampled_from([[64], [32], [32, 32]]))
            segments = [v.Segment(draw(st.sampled_from(["float", "int"])), size) for size in sizes]
            values.append(b.linear(x, f"{index}", segments))
        elif kind == "glu":
            parts = [v.Segment("int", 64), v.Segment("int", 64)]
            values.append(b.gated(b.linear(pick(64), f"{index}", parts), v.Activation.SILU))
        elif kind == "split":
            values += b.split(pick(64), [32, 32])
        elif kind == "add":
            x = pick(64)
            values.append(b.add(x, b.linear(pick(64), f"{index}", [v.Segment("float", 64)])))
        elif kind == "sum":
            values.append(b.add(pick(64), pick(64)))
        elif kind == "scale":
            values.append(b.scale(pick(32, 64), 2.0))
        else:
            x = pick(64)
            values.append(b.attention(x, x, pick(64), num_kv_heads=4, scale=1.0))
    return b.logits(b.rms_norm(b.gather_rows(pick(64)), "norm", 1e-5), "int", 100)


def wants_q8(op: v.Op) -> bool:
    if isinstance(op, v.Linear):
        return any(segment.weight == "int" for segment in op.segments)
    return isinstance(op, v.Logits)


def places(view: View, row_bytes: int) -> np.ndarray:
    rows = view.offset + view.stride * np.arange(ROWS)
    return (rows[:, None] + np.arange(row_bytes)).reshape(-1)


class Paper:
    """An arena that holds, for every byte, which float of which value was written there last."""

    def __init__(self, program: v.Program, layout: Layout) -> None:
        self.layout = layout
        self.owner = np.full(layout.num_bytes, -1, np.int64)
        self.origin = {op.out.id: (op.out.id, 0) for op in program.ops}
        for op in program.ops:
            if isinstance(op, v.Slice):
                parent, start = self.origin[op.x.id]
                self.origin[op.out.id] = (parent, start + op.start)

    def _floats(self, value: v.Value) -> tuple[np.ndarray, np.ndarray]:
        parent, start = self.origin[value.id]
        column = start + np.arange(4 * value.dim) // 4
        tags = parent * 100_000 + np.tile(column, ROWS) + 1000 * np.repeat(np.arange(ROWS), 4 * value.dim)
        return places(self.layout.views[value.id], 4 * value.dim), tags

    def write(self, value: v.Value) -> np.ndarray:
        at, tags = self._floats(value)
        self.owner[at] = tags
        return at

    def read(self, value: v.Value) -> np.ndarray:
        at, tags = self._floats(value)
        assert np.array_equal(self.owner[at], tags), f"{value} was overwritten"
        return at

    def quantize(self, x: v.Value) -> None:
        read, written = self.read(x), places(self.layout.q8[x.id], x.dim * 3 // 2)
        assert not np.intersect1d(read, written).size
        self.owner[written] = -1000 - x.id

    def read_q8(self, x: v.Value) -> np.ndarray:
        at = places(self.layout.q8[x.id], x.dim * 3 // 2)
        assert (self.owner[at] == -1000 - x.id).all(), f"the int8 form of {x} was overwritten"
        return at


def run_on_paper(program: v.Program, layout: Layout, quantizes: Callable[[v.Op], bool] = wants_q8) -> None:
    paper = Paper(program, layout)
    for index, op in enumerate(program.ops):
        if isinstance(op, v.Slice):
            continue
        if isinstance(op, v.Linear | v.Logits) and layout.quantized_at.get(op.x.id) == index:
            paper.quantize(op.x)
        read = {value.id: paper.read(value) for value in inputs(op)}
        if quantizes(op):
            read["q8"] = paper.read_q8(op.x)
        if isinstance(op, v.Logits):
            continue
        written = paper.write(op.out)
        for name, at in read.items():
            shared = np.intersect1d(at, written).size
            in_place = isinstance(op, v.Linear) and op.residual is not None and name == op.residual.id
            # A sum may take its residual's place, float by float; all else is read by other threads meanwhile.
            assert not shared or (in_place and np.array_equal(at, written) and name != op.x.id), (op, name)


@settings(max_examples=60, deadline=None)
@given(programs(), st.booleans())
def test_random_programs_keep_their_values(program: v.Program, fused: bool):
    program = fuse(program) if fused else program
    layout = lay_out(program, ROWS, wants_q8)
    run_on_paper(program, layout)
    views = [*layout.views.values(), *layout.q8.values()]
    assert all(view.offset % 4 == 0 and view.stride % ALIGN == 0 for view in views)


def is_matmul(op: v.Op) -> bool:
    return isinstance(op, v.Linear | v.Logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_keep_their_values(family: str, tmp_path: Path):
    with opened(tiny_model(tmp_path, family)) as model:
        program = fuse(model.program)
    layout = lay_out(program, ROWS, is_matmul)
    run_on_paper(program, layout, is_matmul)
    assert set(layout.q8) == {op.x.id for op in program.ops if is_matmul(op)}
    floats = sum(ROWS * 4 * op.out.dim for op in program.ops if not isinstance(op, v.Slice | v.Logits))
    assert layout.num_bytes < floats / 3, "memory is hardly used again"


def test_a_sum_does_not_overwrite_the_input_of_its_own_product():
    """x + linear(x) without a norm between: other panels still read x when the first one is written."""
    b = Builder()
    x = b.embed("embed", 64)
    y = b.add(x, b.linear(x, "site", [v.Segment("float", 64)]))
    program = fuse(b.logits(b.gather_rows(y), "int", 100))
    layout = lay_out(program, ROWS, wants_q8)
    run_on_paper(program, layout)
    linear = next(op for op in program.ops if isinstance(op, v.Linear))
    assert linear.residual is not None
    assert layout.views[linear.out.id].offset != layout.views[linear.x.id].offset


def test_a_sum_takes_its_residuals_place_where_it_can():
    b = Builder()
    x = b.embed("embed", 64)
    y = b.add(x, b.linear(b.rms_norm(x, "norm", 1e-5), "site", [v.Segment("float", 64)]))
    program = fuse(b.logits(b.gather_rows(y), "int", 100))
    layout = lay_out(program, ROWS, wants_q8)
    linear = next(op for op in program.ops if isinstance(op, v.Linear))
    assert layout.views[linear.out.id] == layout.views[linear.residual.id]


@pytest.mark.parametrize(("dim", "stride"), [(32, 64), (64, 192), (96, 192), (576, 960), (8960, 13504)])
def test_a_quantized_row_fills_an_odd_number_of_cache_lines(dim: int, stride: int):
    assert q8_stride(dim) == stride
