"""KVManager: the block tables of all sequences over all KV groups.

Owns who holds which block ids. Must not know tensors, requests or the scheduler; a sequence is its BlockTables here.
All groups grow in step, so one number of token slots describes a sequence:

    tokens      0 ............ 15 | 16 ........... 31 | 32 ........... 47
    full        block 7           | block 3           | block 9
    window      null (released)   | block 2           | block 5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from yeoul.errors import EngineError
from yeoul.kv.pool import BlockPool
from yeoul.step import NULL_BLOCK
from yeoul.types import KVKind, KVSpec


class GroupUsage(msgspec.Struct, frozen=True):
    """Blocks of one KV group, the null block not counted: used + free = total."""

    used: int
    free: int


class BlockTables:
    """One sequence's block ids, per KV group in position order. Only the KVManager changes them."""

    __slots__ = ("blocks", "num_released", "num_slots")

    def __init__(self, num_groups: int) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_slots = 0
        """Token slots that the tables cover: positions 0 .. num_slots - 1."""
        self.num_released = [0] * num_groups
        """Leading entries per group that were given back and are the null block now."""


class KVManager:
    """Hands out blocks of every KV group. All methods cost O(blocks moved), but `check`."""

    def __init__(self, groups: Sequence[KVSpec], num_blocks: Sequence[int], block_size: int) -> None:
        """`num_blocks` per group, the null block included, in the order of `groups`."""
        if len(groups) != len(num_blocks) or not groups:
            raise ValueError(f"{len(num_blocks)} pools for {len(groups)} KV groups")
        self.block_size = block_size
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self._windows = tuple((group, spec.window) for group, spec in enumerate(groups) if spec.kind is KVKind.WINDOW)
        self._full = tuple(group for group, spec in enumerate(groups) if spec.kind is KVKind.FULL)
        self._nothing: tuple[tuple[int, ...], ...] = ((),) * len(groups)

    def open(self) -> BlockTables:
        """Empty tables for a new sequence; owned by the caller, given back with `free`."""
        return BlockTables(len(self.pools))

    def max_tokens(self, limit: int) -> int:
        """The longest sequence, at most `limit`, that the pools of the full groups can hold when it is alone."""
        return min([limit, *(self.pools[group].capacity * self.block_size for group in self._full)])

    def max_chunk(self, limit: int, num_tokens: int) -> int:
        """The most tokens, at most `limit`, that a sequence of up to `num_tokens` may compute in one step when alone.

        A chunk of n tokens needs the blocks of window + n - 1 positions at once. The result is < 1 for a pool that
        cannot hold the window and one token.
        """
        for group, window in self._windows:
            capacity = self.pools[group].capacity
            if capacity < self._blocks(num_tokens):
                limit = min(limit, (capacity - 1) * self.block_size - window + 2)
        return limit

    def can_grow(self, num_tokens: int, chunk: int) -> bool:
        """Whether an empty sequence could be computed up to `num_tokens`, in chunks of at most `chunk` tokens.

        Reserves nothing: true until the next `grow`.
        """
        needed = self._blocks(num_tokens)
        if any(self.pools[group].num_free < needed for group in self._full):
            return False
        return all(
            self.pools[group].num_free >= min(needed, self._blocks(window + chunk - 2) + 1)
            for group, window in self._windows
        )

    def grow(self, tables: BlockTables, num_tokens: int) -> tuple[tuple[int, ...], ...] | None:
        """Make the tables cover `num_tokens` tokens. Returns the new blocks per group, None if a pool lacks them.

        Nothing changes when it returns None.
        """
        if num_tokens <= tables.num_slots:
            return self._nothing
        count = self._blocks(num_tokens - tables.num_slots)
        for pool in self.pools:
            if pool.num_free < count:
                return None
        new = tuple([pool.allocate(count) for pool in self.pools])
        for table, blocks in zip(tables.blocks, new, strict=True):
            table.extend(blocks)
        tables.num_slots += count * self.block_size
        return new

    def release_window(self, tables: BlockTables, num_computed: int) -> None:
        """Give back what no future token sees, once `num_computed` tokens are computed for good.

        The next token stands at position num_computed and sees from num_computed - window + 1 on; blocks wholly before
        that become the null block in the table.
        """
        for group, window in self._windows:
            first_kept = (num_computed - window + 1) // self.block_size
            first = tables.num_released[group]
            if first_kept > first:
                table = tables.blocks[group]
                self.pools[group].release(table[first:first_kept])
                table[first:first_kept] = [NULL_BLOCK] * (first_kept - first)
                tables.num_released[group] = first_kept

    def free(self, tables: BlockTables) -> None:
        """Give everything back; the tables are empty again afterwards. Idempotent."""
        for group, (pool, table) in enumerate(zip(self.pools, tables.blocks, strict=True)):
            pool.release(table)
            table.clear()
            tables.num_released[group] = 0
        tables.num_slots = 0

    def usage(self) -> tuple[GroupUsage, ...]:
        """Per group, in group order. A snapshot."""
        return tuple([GroupUsage(pool.num_used, pool.num_free) for pool in self.pools])

    def check(self, live: Iterable[BlockTables]) -> None:
        """Recount everything from the tables of all live sequences. O(all blocks).

        Raises EngineError on any mismatch: used + free = total, references = pointers from live tables, tables as long
        as their slots, released entries null and no other.
        """
        sequences = list(live)
        for tables in sequences:
            self._check_shape(tables)
        for group, pool in enumerate(self.pools):
            pool.check(block for tables in sequences for block in tables.blocks[group])

    def _check_shape(self, tables: BlockTables) -> None:
        for table, released in zip(tables.blocks, tables.num_released, strict=True):
            if len(table) * self.block_size != tables.num_slots:
                raise EngineError(f"a table of {len(table)} KV blocks for {tables.num_slots} token slots")
            if any(table[:released]) or NULL_BLOCK in table[released:]:
                raise EngineError("a KV table points at the null block where it should not, or the other way round")

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
