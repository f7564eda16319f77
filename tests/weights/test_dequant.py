"""Each encoding against the `gguf` package's decoder: equal bit for bit."""

import gguf
import numpy as np
import pytest

from yeoul.weights import dequant
from yeoul.weights.dequant import dequantize
from yeoul.weights.tensor import BLOCKS, Tensor, TensorType

SCALES = {
    TensorType.Q4_0: (0,),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0,),
    TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
}
"""Where a block's float16 numbers are."""


def tensor(kind, shape, raw):
    return Tensor("w", kind, shape, np.ascontiguousarray(raw).view(np.uint8).reshape(-1))


def theirs(t):
    rows = t.data.reshape(*t.shape[:-1], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(t.type.value))


def assert_same_bits(t):
    ours, expected = dequantize(t), theirs(t)
    assert ours.dtype == np.float32
    assert ours.shape == t.shape == expected.shape
    np.testing.assert_array_equal(ours.view(np.uint32), expected.view(np.uint32))


def random_blocks(kind, shape, seed=1):
    """Any bytes, but float16 scales that are finite."""
    rng = np.random.default_rng(seed)
    block = BLOCKS[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // block.values, block.bytes), np.uint8)
    for start in SCALES[kind]:
        scale = rng.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, start : start + 2] = scale.view(np.uint8).reshape(-1, 2)
    return tensor(kind, shape, blocks)


@pytest.mark.parametrize("kind", [kind for kind in TensorType if not kind.name.endswith("_K")])
def test_normal_values(kind):
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType(kind.value))
    t = tensor(kind, values.shape, raw)
    assert_same_bits(t)
    assert np.abs(dequantize(t) - values).max() < 0.4


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("shape", [(8, 512), (256,), (2, 3, 256)])
def test_random_blocks(kind, shape):
    assert_same_bits(random_blocks(kind, shape))


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.F16, TensorType.BF16])
def test_every_float(kind):
    """All 16-bit patterns of finite numbers and infinities: subnormals and both zeros among them."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = bits.view(np.float16) if kind is TensorType.F16 else (bits.astype(np.uint32) << 16).view(np.float32)
    bits = bits[~np.isnan(wide)]
    raw = wide[~np.isnan(wide)] if kind is TensorType.F32 else bits
    assert_same_bits(tensor(kind, bits.shape, raw))


@pytest.mark.parametrize("kind", [TensorType.Q4_1, TensorType.Q6_K])
def test_chunks_join(kind, monkeypatch):
    monkeypatch.setattr(dequant, "CHUNK_VALUES", 512)
    assert_same_bits(random_blocks(kind, (5, 768)))


def test_scales_that_are_not_finite_show_in_the_values():
    t = random_blocks(TensorType.Q4_0, (1, 64))
    blocks = t.data.reshape(2, 18).copy()
    blocks[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    out = dequantize(tensor(TensorType.Q4_0, (1, 64), blocks))
    assert not np.isfinite(out[0, :32]).any()
    assert np.isfinite(out[0, 32:]).all()


@pytest.mark.parametrize("shape", [(3, 64), (2, 48), (1, 64)])
def test_data_of_another_size(shape):
    t = random_blocks(TensorType.Q8_0, (2, 64))
    with pytest.raises(ValueError, match="do not make Q8_0"):
        dequantize(Tensor("w", t.type, shape, t.data))
