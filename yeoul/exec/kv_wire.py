"""The wire layout of KV blocks: how keys and values leave an executor, whatever its own layout is.

Owns the format, its checksums and its checks. Must not know where the bytes go. Version 1, little-endian:

    "YKV1" | fingerprint, 32 bytes | number of KV groups, u32
    per group: number of blocks, layers, key bytes, value bytes of one block in one layer; u32 each
    CRC-32 of all that, u32
    per group, block and layer: keys | values | CRC-32 of both, u32
        keys and values: per head [token][dim], then the tokens' scales where the dtype has such

The fingerprint is of everything that decides the numbers (executor, kernel level, model, dtypes): KV that was computed
under another one is refused, because a reply would not be the same bytes any more.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from yeoul.errors import EngineError

Array = np.ndarray

MAGIC = b"YKV1"
GROUP = struct.Struct("<4I")
CHECKSUM = struct.Struct("<I")


def fingerprint(*parts: object) -> bytes:
    """32 bytes that tell numerics apart: of the parts' repr."""
    return hashlib.sha256(repr(parts).encode()).digest()


def encode(numerics: bytes, groups: Sequence[tuple[Array, Array]]) -> bytes:
    """Blocks to bytes. Per group keys and values, uint8 [blocks, layers, bytes], canonical inside."""
    head, body = [MAGIC, numerics, struct.pack("<I", len(groups))], []
    for keys, values in groups:
        blocks, layers = keys.shape[:2]
        head.append(GROUP.pack(blocks, layers, keys.shape[2], values.shape[2]))
        body.append(_with_checksums(np.concatenate([keys, values], axis=2)).tobytes())
    start = b"".join(head)
    return b"".join((start, CHECKSUM.pack(zlib.crc32(start)), *body))


def decode(numerics: bytes, data: bytes) -> list[tuple[Array, Array]]:
    """The inverse of `encode`. Raises EngineError for other numerics, a wrong length or a wrong checksum."""
    head = len(MAGIC) + len(numerics) + 4
    if data[: len(MAGIC)] != MAGIC or data[len(MAGIC) : head - 4] != numerics or len(data) < head:
        raise EngineError("swapped KV is not of this engine's numerics, or no KV at all")
    (count,) = struct.unpack_from("<I", data, head - 4)
    end = head + count * GROUP.size
    if len(data) < end + CHECKSUM.size:
        raise EngineError("swapped KV is incomplete")
    if CHECKSUM.unpack_from(data, end) != (zlib.crc32(data[:end]),):
        raise EngineError("swapped KV is damaged: a checksum is wrong")
    at = end + CHECKSUM.size
    groups: list[tuple[Array, Array]] = []
    for index in range(count):
        blocks, layers, key_bytes, value_bytes = GROUP.unpack_from(data, head + index * GROUP.size)
        width = key_bytes + value_bytes + CHECKSUM.size
        size = blocks * layers * width
        if len(data) < at + size:
            raise EngineError("swapped KV is incomplete")
        parts = np.frombuffer(data, np.uint8, size, at).reshape(blocks, layers, width)
        if not np.array_equal(_with_checksums(parts[:, :, : -CHECKSUM.size]), parts):
            raise EngineError("swapped KV is damaged: a checksum is wrong")
        groups.append((parts[:, :, :key_bytes], parts[:, :, key_bytes : -CHECKSUM.size]))
        at += size
    if at != len(data):
        raise EngineError("swapped KV is longer than it says")
    return groups


def _with_checksums(parts: Array) -> Array:
    """uint8 [blocks, layers, bytes] with the CRC-32 of each part behind it."""
    blocks, layers, _ = parts.shape
    sums = [zlib.crc32(part.tobytes()) for block in parts for part in block]
    checks = np.array(sums, "<u4").reshape(blocks, layers, 1).view(np.uint8)
    return np.concatenate([parts, checks], axis=2)
