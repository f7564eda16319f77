"""What the KV cache makes of keys and values, by dtype: the definition that the native kernels follow.

Owns the roundings. Must not know where the cache lies. Every function takes float32 [.., heads, size] and returns what
is read back, exact in float32: the nearest number of the dtype (ties to even), or its largest beyond the range; a NaN
stays one, for the row's status to report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from yeoul.errors import EngineError

Array = npt.NDArray[np.float32]
Rounding = Callable[[Array, float], Array]

HALF_MAX = np.float32(65504)
BF16_MAX = 2.0**128 - 2.0**120


def store(dtype: str, values: Array, scale: float) -> Array:
    """`values` after a stay in the cache. `scale`: static, of fp8 only. Raises EngineError for an unknown dtype."""
    rounding = ROUNDINGS.get(dtype)
    if rounding is None:
        raise EngineError(f"the reference executor has no KV dtype {dtype!r}")
    return rounding(values.astype(np.float32), scale)


def _f32(values: Array, scale: float) -> Array:
    largest = np.finfo(np.float32).max
    return np.asarray(np.clip(values, -largest, largest), np.float32)


def _f16(values: Array, scale: float) -> Array:
    return np.clip(values, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float32)


def _int8(values: Array, scale: float) -> Array:
    """Codes -127 .. 127 times a scale per token and head: max|x| / 127, rounded to f16."""
    finite = _f32(values, scale)
    largest = np.abs(finite).max(axis=-1, keepdims=True)
    step = _f16(largest / np.float32(127), scale)
    codes = np.rint(finite / np.where(step == 0, np.float32(np.inf), step))
    return np.asarray(np.clip(codes, -127, 127) * step, np.float32)


def _minifloat(fraction: int, bias: int, largest: float, *, scaled: bool = True) -> Rounding:
    """A float of `fraction` bits, with subnormals below exponent 1 - bias and no numbers above `largest`."""

    def rounding(values: Array, scale: float) -> Array:
        unit = np.float32(scale if scaled else 1.0)
        inside = np.clip(values / unit, np.float32(-largest), np.float32(largest)).astype(np.float64)
        _, exponents = np.frexp(inside)
        last = np.maximum(exponents - 1, 1 - bias) - fraction
        nearest = np.ldexp(np.rint(np.ldexp(inside, -last)), last).astype(np.float32)
        return np.asarray(nearest * unit, np.float32)

    return rounding


ROUNDINGS: Mapping[str, Rounding] = MappingProxyType(
    {
        "f16": _f16,
        "f32": _f32,
        "bf16": _minifloat(7, 127, BF16_MAX, scaled=False),
        "int8": _int8,
        "fp8_e4m3": _minifloat(3, 7, 448.0),
        "fp8_e5m2": _minifloat(2, 15, 57344.0),
    }
)
