"""dequantize: a tensor's exact float32 values, for readers, oracles and tests. Vectorized numpy, no speed promised.

Owns the meaning of each encoding's bytes. Must not know file formats, models or kernels. Every operation and its order
is float32 as in ggml's reference decoder, so results equal those of the `gguf` package bit for bit.

The layouts follow `ggml-common.h`. "Nibbles" of n bytes are n low halves, then n high halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from yeoul.weights.tensor import BLOCKS, Tensor, TensorType

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

CHUNK_VALUES = 1 << 18
"""Values decoded at once: temporaries stay in cache, and memory near that of the result."""


def dequantize(tensor: Tensor) -> Floats:
    """The values of a tensor: float32, of the tensor's shape.

    The result of an F32 tensor may be a read-only view of the file. Raises ValueError where `data` does not have the
    size that type and shape ask for.
    """
    block = BLOCKS[tensor.type]
    size = int(np.prod(tensor.shape, dtype=np.int64))
    if tensor.shape[-1] % block.values or size // block.values * block.bytes != tensor.data.size:
        raise ValueError(f"{tensor.name}: {tensor.data.size} bytes do not make {tensor.type.name} {tensor.shape}")
    if tensor.type is TensorType.F32:
        return tensor.data.view(np.float32).reshape(tensor.shape)
    decode = _DECODERS[tensor.type]
    blocks = tensor.data.reshape(-1, block.bytes)
    out = np.empty((len(blocks), block.values), np.float32)
    step = CHUNK_VALUES // block.values
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be inf or NaN: the values say so
        for start in range(0, len(blocks), step):
            out[start : start + step] = decode(blocks[start : start + step])
    return out.reshape(tensor.shape)


def _f16(blocks: Bytes, start: int, count: int = 1) -> Floats:
    """`count` float16 numbers at byte `start` of each block, as float32 [blocks, count]."""
    return np.ascontiguousarray(blocks[:, start : start + 2 * count]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """uint8 [..., n] -> [..., 2n]: low halves, then high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: Bytes) -> Bytes:
    """uint8 [blocks, n] -> [blocks, 8n] of 0 and 1, lowest bit first."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def _decode_f16(blocks: Bytes) -> Floats:
    return _f16(blocks, 0)


def _decode_bf16(blocks: Bytes) -> Floats:
    """The upper half of a float32."""
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _decode_q4_0(blocks: Bytes) -> Floats:
    """d (q - 8): f16 d, 16 bytes of nibbles."""
    return _f16(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _decode_q4_1(blocks: Bytes) -> Floats:
    """d q + m: f16 d, f16 m, 16 bytes of nibbles."""
    return _f16(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _f16(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> Floats:
    """Bit 4 from 4 bytes (bit i belongs to value i), bits 0-3 from 16 bytes of nibbles: float32 [blocks, 32]."""
    return (_nibbles(low) | (_bits(high) << 4)).astype(np.float32)


def _decode_q5_0(blocks: Bytes) -> Floats:
    """d (q - 16): f16 d, 4 bytes of high bits, 16 bytes of nibbles."""
    return _f16(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]) - np.float32(16))


def _decode_q5_1(blocks: Bytes) -> Floats:
    """d q + m: f16 d, f16 m, 4 bytes of high bits, 16 bytes of nibbles."""
    return _f16(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + _f16(blocks, 2)


def _decode_q8_0(blocks: Bytes) -> Floats:
    """d q: f16 d, 32 signed bytes."""
    return _f16(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minimums of the 8 groups of a Q4_K or Q5_K block, float32 [blocks, 8, 1].

    Bytes 0-3: f16 d and dmin. Bytes 4-15: twelve bytes a, b, c of four each; groups 0-3 have scale a & 63, minimum
    b & 63; groups 4-7 have their low four bits in the halves of c, their high two on top of a and b.
    """
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=-1).astype(np.float32)
    minimums = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=-1).astype(np.float32)
    return (_f16(blocks, 0) * scales)[..., None], (_f16(blocks, 2) * minimums)[..., None]


def _k_nibbles(packed: Bytes) -> Bytes:
    """Four runs of 32 bytes, each the nibbles of two groups of 32: uint8 [blocks, 8, 32]."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _decode_q4_k(blocks: Bytes) -> Floats:
    """Per group of 32: (d scale) q - (dmin minimum)."""
    scale, minimum = _k_scales(blocks)
    return (scale * _k_nibbles(blocks[:, 16:]).astype(np.float32) - minimum).reshape(-1, 256)


def _decode_q5_k(blocks: Bytes) -> Floats:
    """As Q4_K, with 32 bytes of high bits between: bit g of byte i belongs to value i of group g."""
    scale, minimum = _k_scales(blocks)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q = (_k_nibbles(blocks[:, 48:]) | (high << 4)).astype(np.float32)
    return (scale * q - minimum).reshape(-1, 256)


def _decode_q6_k(blocks: Bytes) -> Floats:
    """Per group of 16: (d scale) (q - 32), signed 8-bit scales, f16 d at the end.

    Each half of 128 values takes 64 bytes of nibbles and 32 bytes of high bits: the pair j of bits of byte i belongs to
    value i of the half's run j of 32.
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low | (high << 4)).astype(np.float32).reshape(-1, 16, 16) - np.float32(32)
    scale = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[..., None] * q).reshape(-1, 256)


_DECODERS: Mapping[TensorType, Callable[[Bytes], Floats]] = MappingProxyType(
    {
        TensorType.F16: _decode_f16,
        TensorType.BF16: _decode_bf16,
        TensorType.Q4_0: _decode_q4_0,
        TensorType.Q4_1: _decode_q4_1,
        TensorType.Q5_0: _decode_q5_0,
        TensorType.Q5_1: _decode_q5_1,
        TensorType.Q8_0: _decode_q8_0,
        TensorType.Q4_K: _decode_q4_k,
        TensorType.Q5_K: _decode_q5_k,
        TensorType.Q6_K: _decode_q6_k,
    }
)
