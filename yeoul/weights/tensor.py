"""Tensor: a named matrix in a model file, still in the file's own encoding, and the geometry of the encodings.

Must not know which file format a tensor came from, nor what is computed with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np


class TensorType(IntEnum):
    """Encodings, with the numbers that GGUF gives them."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


class Block(NamedTuple):
    """The smallest run of consecutive columns that an encoding stores as one unit."""

    values: int
    bytes: int


BLOCKS: Mapping[TensorType, Block] = MappingProxyType(
    {
        TensorType.F32: Block(1, 4),
        TensorType.F16: Block(1, 2),
        TensorType.BF16: Block(1, 2),
        TensorType.Q4_0: Block(32, 18),
        TensorType.Q4_1: Block(32, 20),
        TensorType.Q5_0: Block(32, 22),
        TensorType.Q5_1: Block(32, 24),
        TensorType.Q8_0: Block(32, 34),
        TensorType.Q4_K: Block(256, 144),
        TensorType.Q5_K: Block(256, 176),
        TensorType.Q6_K: Block(256, 210),
    }
)
"""Values and bytes of one block of every encoding that Yeoul reads."""


@dataclass(frozen=True)
class Tensor:
    """`shape` is (rows, columns), or (columns,) for a vector; `data` is a read-only uint8 view of the mapped file.

    `data` holds the rows one after the other, each columns / BLOCKS[type].values blocks long.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    data: np.ndarray
