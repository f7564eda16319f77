"""Every op of a step against the reference, fed with the native executor's own inputs.

With int8 activations a difference in the last bit of a float flips a rounding, which grows from layer to layer; so what
each op makes of equal inputs is compared, and nothing is carried on.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from native_kit import ISA_LEVELS, Judge, Microscope, Seen, Stay, limits_of, native, opened, pulled
from tiny import FAMILIES, K_SIZES, tiny_model

from yeoul.models.model import Model
from yeoul.ops import vocabulary as v
from yeoul.step import StepPlan

TOLERANCE = 1e-5
"""Of a row's largest magnitude."""
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def assert_close(seen: Seen, expected: np.ndarray) -> None:
    largest = np.abs(expected).max(axis=1, keepdims=True)
    error = np.abs(seen.out - expected).max(axis=1, keepdims=True) / np.maximum(largest, 1e-30)
    assert error.max(initial=0.0) < TOLERANCE, f"{seen.op}: {error.max()}"
    assert np.isfinite(seen.out).all()


def assert_quantized(seen: Seen) -> None:
    """d = max|x| / 127 and q = round-half-even(x x 127 / max|x|) of 32 values, and the sums of q."""
    if seen.q8 is None:
        return
    x = seen.inputs[seen.op.x.id]
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    q = np.rint(groups * (np.float32(127) / largest)).astype(np.int8)
    d = largest[..., 0] / np.float32(127)
    sums = q.reshape(len(x), -1, 16).sum(axis=-1, dtype=np.int32)
    dsum = d * sums.reshape(*d.shape, 2).sum(axis=-1).astype(np.float32)
    rows = [part.tobytes() for parts in zip(q, d, dsum, sums, strict=True) for part in parts]
    assert b"".join(rows) == seen.q8, f"the quantized input of {seen.op}"


def watch(
    model: Model, steps: Sequence[Sequence[int]], length: int, isa: str = "auto", *, large: bool = False
) -> set[type[v.Op]]:
    """Sequences of random tokens, `steps` of each at a time (0: not in this step); returns the kinds of ops seen."""
    rng = np.random.default_rng(1)
    sizes = {"tokens": max(sum(step) for step in steps), "length": length, "seqs": len(steps[0])}
    limits = limits_of(model, **sizes)
    microscope, judge = Microscope(native(model, isa, **sizes)), Judge(model, limits)
    stays = [Stay(model, limits, i, rng.integers(0, model.spec.vocab_size, length)) for i in range(len(steps[0]))]
    kinds = set()
    for index, step in enumerate(steps):
        plan = StepPlan(index, tuple(stay.row(count) for stay, count in zip(stays, step, strict=True) if count))
        gathered = sorted({0, plan.num_tokens // 2, plan.num_tokens - 1})
        judge.begin(plan, gathered)
        for seen in microscope.run(plan, gathered):
            assert_quantized(seen)
            assert_close(seen, judge.expected(seen))
            kinds.add(type(seen.op))
            if large:
                judge.forget_weights()
    return kinds


STEPS = ((40, 7, 0), (1, 12, 17), (27, 1, 1), (1, 1, 9))
"""Prefills, chunks and decodes side by side, past a window of 32 and over the border of a tile."""
SMALL = {"llama": {}, "qwen2": {}, "gemma3": {"layers": 2, "pattern": 2}}
"""One local and one global layer do."""


def check_type(folder: Path, family: str, kind: str, isa: str) -> None:
    overrides = {**(K_SIZES if kind.endswith("_K") else {}), "weight_type": kind, "weight_types": {}}
    with opened(tiny_model(folder, family, **SMALL[family], **overrides)) as model:
        kinds = watch(model, STEPS, length=80, isa=isa)
    assert {v.Embed, v.RMSNorm, v.Linear, v.Rope, v.Attention, v.GatherRows, v.Logits} <= kinds
    assert (v.Scale in kinds) is (family == "gemma3")


@pytest.mark.parametrize(("family", "kind"), [(FAMILIES[i % 3], kind) for i, kind in enumerate(TYPES)])
def test_every_weight_type(family: str, kind: str, tmp_path: Path):
    check_type(tmp_path, family, kind, "auto")


@pytest.mark.models
@pytest.mark.parametrize("isa", ISA_LEVELS)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_type_of_every_family_and_level(family: str, kind: str, isa: str, tmp_path: Path):
    check_type(tmp_path, family, kind, isa)


@pytest.mark.parametrize(("family", "isa"), [(FAMILIES[i % 3], isa) for i, isa in enumerate(ISA_LEVELS)])
def test_mixed_types_biases_and_float32_caches(family: str, isa: str, tmp_path: Path):
    """Types differ inside one op, float and quantized ones as well; not all parts of an op have a bias."""
    types = {"attn_q": "F16", "attn_v": "Q8_0", "ffn_gate": "Q5_1", "ffn_down": "BF16", "token_embd": "Q8_0"}
    bias = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_down")
    with opened(tiny_model(tmp_path, family, **SMALL[family], weight_types=types, bias=bias), "f32") as model:
        watch(model, STEPS, length=80, isa=isa)


def test_sizes_that_fill_no_vector(tmp_path: Path):
    """Heads of 20 dimensions, 5 to a KV head, a vocabulary and an inner size that are no multiples of 16."""
    heads = {"head_dim": 20, "heads": 5, "kv_heads": 1}
    sizes = {"hidden": 50, "ffn": 103, "vocab": 391, "weight_type": "F32", "weight_types": {}}
    with opened(tiny_model(tmp_path, "qwen2", **heads, **sizes)) as model:
        watch(model, STEPS, length=80)


def test_long_contexts_cross_splits(tmp_path: Path):
    """Decodes over one, two and three splits of 512 keys, merged; a chunk that crosses a border."""
    with opened(tiny_model(tmp_path, "llama", layers=1, context=2048)) as model:
        watch(model, [(500, 511), (10, 1), (1, 1), (1, 3), (505, 507), (10, 1), (1, 2)], length=1100)


def test_every_op_of_smollm2():
    with opened(pulled("smollm2-135m")) as model:
        watch(model, [(12, 1)], length=32)


@pytest.mark.models
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("isa", ISA_LEVELS)
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_every_op_of_real_models(name: str, isa: str):
    with opened(pulled(name)) as model:
        watch(model, [(600, 9), (1, 30), (1, 1)], length=640, isa=isa, large=True)
