"""`fuse` changes how much one op does, never what a program computes, and leaves programs well-formed."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from yeoul.models.registry import load_model
from yeoul.ops import vocabulary as v
from yeoul.ops.builder import Builder
from yeoul.ops.passes import fuse, inputs, renumber
from yeoul.weights.gguf import GGUFFile


def feed_forward_program(*, share: bool = False) -> v.Program:
    b = Builder()
    x = b.embed("embd", 8)
    h = b.linear(x, "gate_up", [v.Segment("gate", 16), v.Segment("up", 16)])
    h = b.gated(h, v.Activation.SILU)
    down = b.linear(h, "down", [v.Segment("down", 8)])
    x = b.add(x, down)
    if share:
        x = b.add(x, down)
    return b.logits(b.gather_rows(x), "embd", 32)


def kinds(program: v.Program) -> list[str]:
    return [type(op).__name__ for op in program.ops]


def assert_well_formed(program: v.Program) -> None:
    defined: set[int] = set()
    for op in program.ops:
        assert {value.id for value in inputs(op)} <= defined
        assert not defined or op.out.id > max(defined)
        defined.add(op.out.id)


def test_fuse_folds_activation_and_residual():
    fused = fuse(feed_forward_program())
    assert kinds(fused) == ["Embed", "Linear", "Linear", "GatherRows", "Logits"]
    embed, gate_up, down, gather, _ = fused.ops
    assert gate_up == v.Linear(
        v.Value(1, v.Rows.T, 16),
        embed.out,
        "gate_up",
        (v.Segment("gate", 16), v.Segment("up", 16)),
        glu=v.Activation.SILU,
    )
    assert (down.x, down.residual, down.glu) == (gate_up.out, embed.out, None)
    assert gather.x == down.out
    assert_well_formed(fused)


def test_fuse_leaves_a_result_that_others_read():
    fused = fuse(feed_forward_program(share=True))
    assert kinds(fused) == ["Embed", "Linear", "Linear", "Add", "Add", "GatherRows", "Logits"]
    assert fused.ops[2].residual is None
    assert_well_formed(fused)


def test_fuse_leaves_a_value_added_to_itself():
    b = Builder()
    x = b.linear(b.embed("embd", 8), "site", [v.Segment("w", 8)])
    program = b.logits(b.gather_rows(b.add(x, x)), "embd", 32)
    assert kinds(fuse(program)) == kinds(program)


def test_fuse_takes_the_residual_on_either_side():
    b = Builder()
    x = b.embed("embd", 8)
    program = b.logits(b.gather_rows(b.add(b.linear(x, "site", [v.Segment("w", 8)]), x)), "embd", 32)
    fused = fuse(program)
    assert fused.ops[1].residual == fused.ops[0].out


@pytest.mark.parametrize("sizes", [(32,), (8, 24), (8, 8, 16)])
def test_fuse_leaves_an_activation_whose_halves_are_not_two_segments(sizes: tuple[int, ...]):
    b = Builder()
    h = b.linear(b.embed("embd", 8), "site", [v.Segment(f"w{size}", size) for size in sizes])
    program = b.logits(b.gather_rows(b.gated(h, v.Activation.SILU)), "out", 32)
    assert kinds(fuse(program)) == kinds(program)


def test_fuse_keeps_kv_groups_and_is_idempotent(tiny_paths: Mapping[str, Path]):
    for path in tiny_paths.values():
        program = load_model(GGUFFile.open(path)).program
        fused = fuse(program)
        assert fused.kv_groups == program.kv_groups
        assert fuse(fused) == fused
        assert_well_formed(fused)
        assert not [op for op in fused.ops if isinstance(op, v.GatedActivation)]


def test_renumber_refuses_a_use_before_definition():
    program = feed_forward_program()
    with pytest.raises(ValueError, match="not defined before it"):
        renumber([program.ops[1], program.ops[0], *program.ops[2:]])


def test_renumber_renames_uses_too():
    program = feed_forward_program()
    shifted = [replace(op, out=replace(op.out, id=op.out.id * 10)) for op in program.ops[:1]]
    moved = replace(program.ops[1], x=shifted[0].out)
    first, second = renumber([*shifted, moved]).ops
    assert second.x == first.out == v.Value(0, v.Rows.T, 8)
