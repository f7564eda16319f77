"""The roundings of the KV cache against their definitions, number by number."""

import numpy as np
import pytest

from yeoul.errors import EngineError
from yeoul.exec.reference_kv import ROUNDINGS, store
from yeoul.types import KV_DTYPES

FP8 = {"fp8_e4m3": (4, 3, 7, 448.0), "fp8_e5m2": (5, 2, 15, 57344.0)}
"""Bits of exponent and fraction, bias, largest."""


def rounded(dtype: str, *values: float, scale: float = 1.0) -> list[float]:
    """Each value alone in its head."""
    return store(dtype, np.array(values, np.float32)[:, None], scale)[:, 0].tolist()


def numbers_of(dtype: str) -> np.ndarray:
    """All finite non-negative numbers of an fp8 type, ascending, from their bits."""
    exponent_bits, fraction_bits, bias, largest = FP8[dtype]
    codes = np.arange(2 ** (exponent_bits + fraction_bits))
    exponent, fraction = codes >> fraction_bits, codes % 2**fraction_bits / 2**fraction_bits
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return values[values <= largest]


def test_every_dtype_has_a_rounding():
    assert set(ROUNDINGS) == set(KV_DTYPES)
    with pytest.raises(EngineError, match="no KV dtype 'int3'"):
        store("int3", np.zeros((1, 1), np.float32), 1.0)


@pytest.mark.parametrize("dtype", list(FP8))
def test_fp8_is_the_nearest_number_ties_to_even(dtype):
    numbers = numbers_of(dtype)
    assert len(numbers) == (127 if dtype == "fp8_e4m3" else 124)
    assert rounded(dtype, *numbers, *-numbers) == [*numbers, *-numbers]
    middles = (numbers[:-1] + numbers[1:]) / 2
    even = np.where(np.arange(len(middles)) % 2 == 0, numbers[:-1], numbers[1:])
    assert rounded(dtype, *middles) == even.tolist()
    assert rounded(dtype, *np.nextafter(np.float32(middles), np.float32(0))) == numbers[:-1].tolist()
    assert rounded(dtype, *np.nextafter(np.float32(middles), np.float32(np.inf))) == numbers[1:].tolist()


@pytest.mark.parametrize("dtype", list(KV_DTYPES))
def test_beyond_the_range_is_the_largest_and_nan_stays(dtype):
    low, high, broken = rounded(dtype, -np.inf, np.inf, np.nan)
    assert -low == high > 400 and np.isfinite(high) and np.isnan(broken)
    assert rounded(dtype, 0.0) == [0.0]


def test_bf16_is_the_upper_half_of_the_bits():
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32) * np.float32(1e3)
    bits = values.view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    assert np.array_equal(store("bf16", values[:, None], 1.0)[:, 0], expected)


def test_int8_has_a_scale_per_token_and_head():
    values = np.random.default_rng(2).normal(size=(5, 3, 64)).astype(np.float32)
    values[1, 2] *= 1000
    values[3, 0] = 0
    kept = store("int8", values, 1.0)
    step = np.abs(values).max(axis=-1, keepdims=True) / 127
    assert (np.abs(kept - values) <= 0.5 * step * 1.08).all()
    assert np.array_equal(kept[:1], store("int8", values[:1], 1.0)), "a token depends on itself only"
    codes = kept / np.where(step, step.astype(np.float16), 1)
    assert np.abs(codes).max() == 127 and np.array_equal(codes, np.rint(codes))


@pytest.mark.parametrize("dtype", list(KV_DTYPES))
def test_only_fp8_has_a_static_scale(dtype):
    values = np.random.default_rng(3).normal(size=100).astype(np.float32) * np.float32(3)
    scaled, plain = rounded(dtype, *values, scale=0.02), rounded(dtype, *values)
    if dtype not in FP8:
        assert scaled == plain
        return
    assert scaled != plain
    assert np.allclose(scaled, np.array(rounded(dtype, *(values / np.float32(0.02)))) * 0.02, rtol=1e-6)
