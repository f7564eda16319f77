"""NativeBlocks: KV blocks of the native executor in the canonical layout. Owns the conversion of its private one.

A native block holds for each layer keys, per head [dim][16 tokens] and the tokens' scales if the dtype has such, then
values, per head [16 tokens][dim] and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from yeoul.types import KV_DTYPES, KVSpec

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
        stored = KV_DTYPES[spec.k_dtype]
        key_bytes = TOKENS * spec.num_kv_heads * (spec.key_size * stored.value_bytes + stored.scale_bytes)
        raw = np.empty((len(blocks), layers, TOKENS * spec.token_bytes()), np.uint8)
        for index, block in enumerate(blocks):
            raw[index] = self._program.read_block(group, block).reshape(layers, -1)
        return _turned(raw[:, :, :key_bytes], spec, spec.key_size, TOKENS), raw[:, :, key_bytes:]

    def write_blocks(self, group: int, blocks: Sequence[int], keys: Array, values: Array) -> None:
        """The inverse of read_blocks. Raises IndexError also for arrays of another shape."""
        spec, _ = self._groups[group]
        raw = np.concatenate([_turned(keys, spec, TOKENS, spec.key_size), values], axis=2)
        for index, block in enumerate(blocks):
            self._program.write_block(group, block, raw[index].reshape(-1))


def _turned(keys: Array, spec: KVSpec, rows: int, columns: int) -> Array:
    """Keys [.., head, rows, columns] as [.., head, columns, rows], inside uint8 [blocks, layers, bytes].

    What follows the values of a head, its scales, stays where it is.
    """
    blocks, layers, _ = keys.shape
    heads, value_bytes = spec.num_kv_heads, KV_DTYPES[spec.k_dtype].value_bytes
    values, scales = np.split(keys.reshape(blocks, layers, heads, -1), [rows * columns * value_bytes], axis=3)
    turned = values.reshape(blocks, layers, heads, rows, columns, value_bytes).swapaxes(3, 4)
    return np.concatenate([turned.reshape(values.shape), scales], axis=3).reshape(blocks, layers, -1)
