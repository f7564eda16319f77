"""Every KV dtype in the native executor: each op as the reference has it, equal bits in any batch, scales."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from native_kit import ISA_LEVELS, limits_of, log_softmax, native, opened, prefill
from test_native_invariance import assert_invariant
from test_native_ops import SMALL, STEPS, watch
from tiny import FAMILIES, tiny_model

from yeoul import _native
from yeoul.types import KV_DTYPES

NEW = ("bf16", "int8", "fp8_e4m3", "fp8_e5m2")
PAIRS = [
    *((dtype, dtype) for dtype in NEW),
    ("f16", "int8"),
    ("int8", "fp8_e4m3"),
    ("fp8_e5m2", "f32"),
    ("bf16", "f16"),
]
SCALES = {f"llama.attention.{name}_cache_scales": [0.02, 0.03] for name in ("k", "v")}


@pytest.mark.parametrize("isa", ISA_LEVELS)
@pytest.mark.parametrize(("index", "pair"), list(enumerate(PAIRS)))
def test_every_op(index: int, pair: tuple[str, str], isa: str, tmp_path: Path):
    family = FAMILIES[index % 3]
    with opened(tiny_model(tmp_path, family, **SMALL[family]), *pair) as model:
        watch(model, STEPS, length=80, isa=isa)


@pytest.mark.models
@pytest.mark.parametrize("pair", list(product(KV_DTYPES, KV_DTYPES)))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_of_dtypes(family: str, pair: tuple[str, str], tmp_path: Path):
    with opened(tiny_model(tmp_path, family, **SMALL[family]), *pair) as model:
        watch(model, STEPS, length=80)
        assert_invariant(model, 150, seed=2)


@pytest.mark.parametrize("isa", ISA_LEVELS)
@pytest.mark.parametrize("dtype", NEW)
def test_equal_bits_in_any_batch(dtype: str, isa: str, tmp_path: Path):
    with opened(tiny_model(tmp_path, "gemma3", layers=2, pattern=2), dtype) as model:
        assert_invariant(model, 150, isa=isa, seed=1)
        assert_invariant(model, 40, isa=isa, seed=4, chunks=(1,))


@pytest.mark.parametrize("dtype", NEW)
def test_contexts_of_several_splits(dtype: str, tmp_path: Path):
    with opened(tiny_model(tmp_path, "llama", layers=1, context=2048), dtype) as model:
        assert_invariant(model, 600, seed=2, chunks=(1, 1, 64, 150, 200))


def logits_of(path: Path, dtype: str) -> np.ndarray:
    with opened(path, dtype) as model:
        tokens = np.random.default_rng(5).integers(0, model.spec.vocab_size, 100).tolist()
        return prefill(native(model), model, tokens, limits_of(model))


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def kl(p: np.ndarray, q: np.ndarray) -> float:
    p, q = log_softmax(p), log_softmax(q)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def test_errors_are_those_of_the_dtype(tmp_path: Path):
    """Without quantized activations the cache is what differs: more bits of fraction are nearer to f32."""
    path = tiny_model(tmp_path, "llama", weight_type="F32", weight_types={})
    exact = logits_of(path, "f32")
    loss = {dtype: kl(exact, logits_of(path, dtype)) for dtype in ("f16", *NEW)}
    assert 0 < loss["f16"] < loss["bf16"] < loss["fp8_e4m3"] < loss["fp8_e5m2"] < 0.05
    assert loss["f16"] < loss["int8"] < loss["fp8_e4m3"]


@pytest.mark.parametrize("dtype", list(KV_DTYPES))
def test_scales_of_the_file_reach_fp8_and_nothing_else(dtype: str, tmp_path: Path):
    plain, scaled = (
        tiny_model(folder(tmp_path / name), "llama", weight_type="F32", weight_types={}, metadata=metadata)
        for name, metadata in (("plain", {}), ("scaled", SCALES))
    )
    same = np.array_equal(logits_of(plain, dtype), logits_of(scaled, dtype))
    assert same is not dtype.startswith("fp8")
    with opened(scaled, dtype) as model:
        watch(model, STEPS, length=80)


def test_an_unknown_dtype_is_refused():
    group = (3, 1, 16, 16, "int3", "f16", 0, 1, np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match="no KV dtype 'int3'"):
        _native.Program(_native.Pool(1), "generic", 64, [group])
