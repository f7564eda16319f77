"""BlockTables: what one sequence holds of every KV group; Prefix: what a stay can begin with instead of computing it.

Owns the data only. Must not know pools, tensors or the scheduler; only the KVManager changes tables.
"""

from __future__ import annotations

import msgspec

from yeoul.kv.prefix import KeyChain
from yeoul.step import BlockCopy


class BlockTables:
    """One sequence's block ids, per KV group in position order. All groups grow in step:

    tokens      0 ............ 15 | 16 ........... 31 | 32 ........... 47
    full        block 7           | block 3           | block 9             reserved: 4, 8
    window      null (released)   | block 2           | block 5
    """

    __slots__ = ("blocks", "chain", "limit", "num_published", "num_released", "num_slots", "reserved")

    def __init__(self, num_groups: int, chain: KeyChain, limit: int) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_slots = 0
        """Token slots that the tables cover: positions 0 .. num_slots - 1."""
        self.num_released = [0] * num_groups
        """Leading entries per group that were given back and are the null block now."""
        self.reserved: list[list[int]] = [[] for _ in range(num_groups)]
        """Blocks held for later by an allocation policy; `blocks` grows out of them first."""
        self.chain = chain
        self.num_published = 0
        """Leading blocks that the prefix index has been told of."""
        self.limit = limit
        """Tokens that the sequence can ever have."""


class Prefix(msgspec.Struct, frozen=True):
    """KV of positions 0 .. num_tokens - 1 that exists already. Holds no references: true until pools change.

    `blocks`: per KV group the ids of the full blocks to share, null where the sequence will not look any more.
    `partial`: per KV group the block whose first num_tokens % block_size tokens are to be copied; empty: none.
    """

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()


class Start(msgspec.Struct, frozen=True):
    """What a stay begins with: the whole tables per KV group, and the copies that must be made before it runs."""

    blocks: tuple[tuple[int, ...], ...]
    copies: tuple[BlockCopy, ...] = ()
