"""The numerics contract: a position's logits are the same bits in prefill, chunks and decode, beside any neighbours,
with any number of threads, on any block table."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from native_kit import ISA_LEVELS, Stay, limits_of, native, opened, prefill, pulled
from tiny import K_SIZES, tiny_model

from yeoul.models.model import Model
from yeoul.step import StepPlan

CHUNKS = (1, 1, 1, 2, 3, 5, 16, 17, 33, 64)


def in_pieces(
    model: Model, tokens: list[int], rng: np.random.Generator, *, isa: str, threads: int, chunks: tuple[int, ...]
) -> np.ndarray:
    """Logits [len(tokens), vocab] of a sequence in chunks of random size, beside two others that come and go."""
    sizes = {"tokens": 256, "length": len(tokens), "seqs": 3}
    limits, executor = limits_of(model, **sizes), native(model, isa, threads, **sizes)
    mine, out = Stay(model, limits, int(rng.integers(3)), tokens), []
    others: dict[int, Stay] = {}
    for step in range(10 * len(tokens)):
        if not mine.left:
            break
        rows = [mine.row(min(mine.left, int(rng.choice(chunks))))]
        for slot in {0, 1, 2} - {mine.slot}:
            if slot not in others or not others[slot].left:
                other_tokens = rng.integers(0, model.spec.vocab_size, int(rng.integers(1, 60)))
                others[slot] = Stay(model, limits, slot, other_tokens)
            if rng.random() < 0.5:
                rows.append(others[slot].row(min(others[slot].left, int(rng.choice(chunks)))))
        order = rng.permutation(len(rows))
        logits = executor.logits(StepPlan(step, tuple(rows[i] for i in order)))
        begin = sum(rows[i].num_tokens for i in order[: int(np.flatnonzero(order == 0)[0])])
        out.append(logits[begin : begin + rows[0].num_tokens])
    executor.close()
    return np.concatenate(out)


def assert_invariant(
    model: Model, length: int, *, isa: str = "auto", seed: int = 0, chunks: tuple[int, ...] = CHUNKS
) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.spec.vocab_size, length).tolist()
    sizes = {"tokens": length, "length": length, "seqs": 1}
    whole = prefill(native(model, isa, 1, **sizes), model, tokens, limits_of(model, **sizes))
    pieces = in_pieces(model, tokens, rng, isa=isa, threads=1 + seed % 3, chunks=chunks)
    different = np.flatnonzero((pieces.view(np.uint32) != whole.view(np.uint32)).any(axis=1))
    assert not different.size, f"positions {different[:10]} of {length}"


VARIANTS: Mapping[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "qwen2-k": ("qwen2", {**K_SIZES, "weight_types": {"ffn_down": "Q6_K", "attn_v": "Q5_K"}}),
    "gemma3": ("gemma3", {}),
    "f32": ("llama", {"weight_type": "F32", "weight_types": {}}),
    "bf16": ("gemma3", {"weight_type": "BF16", "weight_types": {}, "layers": 2, "pattern": 2}),
}


@pytest.mark.parametrize("isa", ISA_LEVELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_models(variant: str, isa: str, tmp_path: Path):
    family, overrides = VARIANTS[variant]
    with opened(tiny_model(tmp_path, family, **overrides)) as model:
        for seed in range(1 if isa == "generic" else 3):
            assert_invariant(model, 300 if seed else 150, isa=isa, seed=seed)
        assert_invariant(model, 60, isa=isa, seed=4, chunks=(1,))


def test_contexts_of_several_splits(tmp_path: Path):
    with opened(tiny_model(tmp_path, "llama", layers=1, context=2048), "f32") as model:
        assert_invariant(model, 1100, seed=2, chunks=(1, 1, 64, 150, 200))


def test_levels_with_fused_multiply_add_agree(tmp_path: Path):
    """Not promised, but so today: AVX2, AVX-512 and AMX differ in speed only."""
    levels = [isa for isa in ISA_LEVELS if isa != "generic"]
    if len(levels) < 2:
        pytest.skip("this processor runs one level beside the generic one")
    with opened(tiny_model(tmp_path, "gemma3")) as model:
        tokens = np.random.default_rng(0).integers(0, model.spec.vocab_size, 100).tolist()
        first, *others = [prefill(native(model, isa), model, tokens, limits_of(model)) for isa in levels]
    assert all(np.array_equal(first, other) for other in others)


def test_smollm2():
    with opened(pulled("smollm2-135m")) as model:
        assert_invariant(model, 300, seed=1)


@pytest.mark.models
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_real_models(name: str):
    with opened(pulled(name)) as model:
        for seed in range(3):
            assert_invariant(model, 620, seed=seed, chunks=(1,) if seed == 2 else CHUNKS)
