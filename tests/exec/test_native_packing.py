"""Packed weights hold the file's values: every row of every type equals the reader's decoder."""

import numpy as np
import pytest

from yeoul import _native
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


def random_tensor(kind: TensorType, rows: int, columns: int, seed: int) -> Tensor:
    """Every bit pattern that a file may have, but with finite scales."""
    rng = np.random.default_rng(seed)
    block = BLOCKS[kind]
    if kind in SCALES:
        raw = rng.integers(0, 256, (rows * columns // block.values, block.bytes), dtype=np.uint8)
        for at in SCALES[kind]:
            scale = rng.standard_normal(len(raw)).astype(np.float16)
            raw[:, at : at + 2] = scale.reshape(-1, 1).view(np.uint8)
    else:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        raw = {
            TensorType.F32: lambda: values,
            TensorType.F16: lambda: values.astype(np.float16),
            TensorType.BF16: lambda: (values.view(np.uint32) >> 16).astype(np.uint16),
        }[kind]()
    return Tensor("w", kind, (rows, columns), np.ascontiguousarray(raw).view(np.uint8).reshape(-1))


def packed(tensor: Tensor, threads: int = 2) -> _native.PackedWeight:
    arena = _native.WeightArena(_native.packed_bytes(tensor.type, *tensor.shape))
    return _native.pack(tensor.type, *tensor.shape, tensor.data, arena, _native.Pool(threads))


@pytest.mark.parametrize("kind", TensorType)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("blocks", [1, 3])
def test_rows_equal_the_decoder(kind: TensorType, rows: int, blocks: int):
    columns = blocks * BLOCKS[kind].values if kind in SCALES else 7 * blocks
    tensor = random_tensor(kind, rows, columns, seed=rows)
    weight = packed(tensor)
    values = np.stack([weight.row(i) for i in range(rows)])
    assert np.array_equal(values, dequantize(tensor))
    assert weight.quantized is (kind in SCALES)


@pytest.mark.parametrize("kind", TensorType)
def test_packed_weights_are_no_larger_than_the_file(kind: TensorType):
    """Rows in whole panels of 16: bits per weight are the file's, up to the unpacked 6-bit scales of Q4_K and Q5_K."""
    rows, columns = 64, 2048
    file_bytes = rows * columns // BLOCKS[kind].values * BLOCKS[kind].bytes
    assert file_bytes <= _native.packed_bytes(kind, rows, columns) <= file_bytes * 1.06


def test_any_number_of_threads_packs_the_same():
    tensor = random_tensor(TensorType.Q4_K, 100, 512, seed=1)
    one, three = packed(tensor, 1), packed(tensor, 3)
    assert all(np.array_equal(one.row(i), three.row(i)) for i in range(100))


@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [(2, 1, 33), (12, 1, 128), (0, 0, 4), (0, 4, 0), (0, -1, 4), (10, 1, 256), (-1, 1, 256), (0, 1 << 31, 1 << 30)],
)
def test_shapes_that_cannot_be(kind: int, rows: int, columns: int):
    with pytest.raises(ValueError, match="type"):
        _native.packed_bytes(kind, rows, columns)


@pytest.mark.parametrize("size", [0, 35, 37])
def test_bytes_that_do_not_fit_the_shape(size: int):
    arena = _native.WeightArena(1024)
    with pytest.raises(ValueError, match="do not fit"):
        _native.pack(2, 2, 32, np.zeros(size, np.uint8), arena, _native.Pool(1))


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_that_is_not_there(row: int):
    with pytest.raises(IndexError, match="no such row"):
        packed(random_tensor(TensorType.F32, 5, 3, 0)).row(row)
