"""NativeBlocks: KV blocks of the native executor in the canonical layout. Owns the conversion of its private one.

A native block holds for each layer keys [head][dim][16 tokens], then values [head][16 tokens][dim].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from yeoul.kv.sizing import DTYPE_BYTES
from yeoul.types import KVSpec

Array = np.ndarray
TOKENS = 16


class NativeBlocks:
    """See yeoul.exec.swap.BlockAccess."""

    def __init__(self, program: Any, groups: Sequence[tuple[KVSpec, Sequence[int]]]) -> None:
        """`program`: the native one; `groups`: as Program.kv_groups has them."""
        self._program = program
        self._groups = [(spec, len(layers)) for spec, layers in groups]

    def read_blocks(self, group: int, blocks: Sequence[int]) -> tuple[Array, Array]:
        """uint8 [blocks, layers, bytes] each. Raises IndexError for a block that does not exist."""
        spec, layers = self._groups[group]
        key_bytes, value_bytes = _bytes(spec)
        raw = np.empty((len(blocks), layers, key_bytes + value_bytes), np.uint8)
        for index, block in enumerate(blocks):
            raw[index] = self._program.read_block(group, block).reshape(layers, -1)
        return _turn(raw[:, :, :key_bytes], spec.num_kv_heads, spec.key_size, TOKENS), raw[:, :, key_bytes:]

    def write_blocks(self, group: int, blocks: Sequence[int], keys: Array, values: Array) -> None:
        """The inverse of read_blocks. Raises IndexError also for arrays of another shape."""
        spec, _ = self._groups[group]
        raw = np.concatenate([_turn(keys, spec.num_kv_heads, TOKENS, spec.key_size), values], axis=2)
        for index, block in enumerate(blocks):
            self._program.write_block(group, block, raw[index].reshape(-1))


def _bytes(spec: KVSpec) -> tuple[int, int]:
    """Of keys and of values of one block in one layer."""
    tokens = TOKENS * spec.num_kv_heads
    return tokens * spec.key_size * DTYPE_BYTES[spec.k_dtype], tokens * spec.value_size * DTYPE_BYTES[spec.v_dtype]


def _turn(parts: Array, heads: int, rows: int, columns: int) -> Array:
    """[.., head, rows, columns] to [.., head, columns, rows] of the elements inside uint8 [blocks, layers, bytes]."""
    blocks, layers, _ = parts.shape
    elements = parts.reshape(blocks, layers, heads, rows, columns, -1)
    return elements.transpose(0, 1, 2, 4, 3, 5).reshape(blocks, layers, -1)
