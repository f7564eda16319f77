"""KVManager: the block tables of all sequences over all KV groups.

Owns who holds which block ids, and what a new stay can share. Must not know tensors, requests or the scheduler; a
sequence is its BlockTables here. All groups grow in step, so one number of token slots describes a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from yeoul.errors import EngineError
from yeoul.kv.allocation import blocks_to_hold
from yeoul.kv.pool import BlockPool
from yeoul.kv.prefix import KeyChain
from yeoul.kv.tables import BlockTables, Prefix, Start
from yeoul.step import NULL_BLOCK, BlockCopy
from yeoul.types import KVKind, KVSpec

NewBlocks = tuple[tuple[int, ...], ...]
"""Per KV group, what a sequence's block table grew by."""


class GroupUsage(msgspec.Struct, frozen=True):
    """Blocks of one KV group, the null block not counted: used + cached + free = total."""

    used: int
    cached: int
    """Not used, contents known: free for whoever needs a block, and a hit for whoever needs the contents."""
    free: int


class SlotUsage(msgspec.Struct, frozen=True):
    """Token slots of all groups' used blocks by what they are for; they add up to the used blocks' slots.

    Shared blocks count once, so this is what the pool really holds.
    """

    computed: int
    partial: int
    """The rest of last blocks."""
    reserved: int
    """Held by an allocation policy for tokens that the sequence may still have."""
    over_reserved: int
    """Held for tokens that the sequence can never have."""


class KVManager:
    """Hands out blocks of every KV group. All methods cost O(blocks moved or matched), but `check`."""

    def __init__(
        self,
        groups: Sequence[KVSpec],
        num_blocks: Sequence[int],
        block_size: int,
        *,
        prefix_caching: bool = False,
        allocation: str = "paged",
        max_model_len: int = 0,
    ) -> None:
        """`num_blocks` per group, the null block included, in the order of `groups`.

        `max_model_len` is what the allocation `reserve_max` reserves and where `pow2` ends.
        """
        if len(groups) != len(num_blocks) or not groups:
            raise ValueError(f"{len(num_blocks)} pools for {len(groups)} KV groups")
        self.block_size = block_size
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self._prefix_caching = prefix_caching
        self._allocation = allocation
        self._windows = tuple((group, spec.window) for group, spec in enumerate(groups) if spec.kind is KVKind.WINDOW)
        self._full = tuple(group for group, spec in enumerate(groups) if spec.kind is KVKind.FULL)
        self.nothing: NewBlocks = ((),) * len(groups)
        self._longest = self._blocks(self.max_tokens(max_model_len))

    def open(self, token_ids: Sequence[int] = (), *, salt: str | None = None, limit: int = 0) -> BlockTables:
        """Empty tables for a new sequence; owned by the caller, given back with `free`.

        `token_ids` is the sequence's own list, to which tokens may be appended; `limit`: the most it can ever have.
        """
        return BlockTables(len(self.pools), KeyChain(token_ids, self.block_size, salt), limit)

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

    def match(self, tables: BlockTables, num_tokens: int) -> Prefix:
        """The longest prefix of a sequence's first `num_tokens` tokens that is cached in every group.

        Whole blocks only, and never the last token: a sequence has to compute something to go on. A window group needs
        no more than what the next token sees.
        """
        count = (num_tokens - 1) // self.block_size if self._prefix_caching else 0
        found: dict[int, list[int]] = {}
        for group in (*self._full, *(group for group, _ in self._windows)):
            found[group] = self._cached_blocks(group, tables.chain, count)
            if group in self._full:
                count = len(found[group])
        runs = [(window, _run_lengths(found[group][:count])) for group, window in self._windows]
        while count and any(runs_[count] < count - self._first_seen(window, count) for window, runs_ in runs):
            count -= 1
        return self._prefix(count, found)

    def _cached_blocks(self, group: int, chain: KeyChain, count: int) -> list[int]:
        """Blocks of a group that hold a sequence's first ones: a full group's up to the first miss, else null ones."""
        index, ends = self.pools[group].index, group in self._full
        found: list[int] = []
        for i in range(count):
            block = index.find(chain, i)
            if block is None and ends:
                break
            found.append(NULL_BLOCK if block is None else block)
        return found

    def _prefix(self, count: int, found: dict[int, list[int]]) -> Prefix:
        """The first `count` blocks; null ones in a window group where the next token sees nothing."""
        blocks = [found[group][:count] for group in range(len(self.pools))]
        for group, window in self._windows:
            first = self._first_seen(window, count)
            blocks[group][:first] = [NULL_BLOCK] * first
        return Prefix(count * self.block_size, tuple([tuple(ids) for ids in blocks]))

    def _first_seen(self, window: int, count: int) -> int:
        """The first block that the token after `count` blocks sees."""
        return self._first_kept(window, count * self.block_size)

    def _first_kept(self, window: int, num_tokens: int) -> int:
        """The first block that the token at position num_tokens sees."""
        return max(0, (num_tokens - window + 1) // self.block_size)

    def fork(self, source: BlockTables, num_tokens: int) -> Prefix | None:
        """The first `num_tokens` tokens of a live sequence, which has computed them, for another one to begin with.

        Full blocks are shared; a block in which both would write is copied. None where the source does not hold any
        more what the next token sees of a window group.
        """
        whole, rest = divmod(num_tokens, self.block_size)
        blocks = [source.blocks[group][:whole] for group in range(len(self.pools))]
        for group, window in self._windows:
            first = self._first_kept(window, num_tokens)
            if source.num_released[group] > first:
                return None
            blocks[group][:first] = [NULL_BLOCK] * first
        partial = tuple([table[whole] for table in source.blocks]) if rest else ()
        return Prefix(num_tokens, tuple([tuple(ids) for ids in blocks]), partial)

    def start(self, tables: BlockTables, prefix: Prefix, num_tokens: int, num_known: int, chunk: int) -> Start | None:
        """Begin a stay: share the prefix, then cover `num_tokens` tokens. None, changing nothing, if there is no room.

        Asks for room for all `num_known` tokens, computed in chunks of at most `chunk`, so that no half-computed prompt
        is admitted just to be preempted. The tables must be empty.
        """
        if not self._has_room(tables, prefix, num_known, chunk):
            return None
        whole = prefix.num_tokens // self.block_size
        for group, blocks in enumerate(prefix.blocks):
            pool = self.pools[group]
            for block in blocks:
                if block != NULL_BLOCK:
                    pool.retain(block)
            tables.blocks[group] = list(blocks)
        for group, window in self._windows:
            tables.num_released[group] = self._first_kept(window, prefix.num_tokens)
        tables.num_slots = whole * self.block_size
        tables.num_published = whole
        if self.grow(tables, num_tokens) is None:
            raise EngineError("the KV pool lacks blocks that it said were free")
        copies = [BlockCopy(group, source, tables.blocks[group][whole]) for group, source in enumerate(prefix.partial)]
        return Start(tuple([tuple(table) for table in tables.blocks]), tuple(copies))

    def restore(self, tables: BlockTables, prefix: Prefix, num_tokens: int, num_known: int, chunk: int) -> Start | None:
        """`start` for a prefix whose keys and values will be written to new blocks: those that `held` names then."""
        if not self._has_room(tables, prefix, num_known, chunk):
            return None
        count = self._blocks(prefix.num_tokens)
        for group, window in self._windows:
            tables.num_released[group] = self._first_kept(window, prefix.num_tokens)
        for group, pool in enumerate(self.pools):
            released = tables.num_released[group]
            tables.blocks[group] = [NULL_BLOCK] * released + list(pool.allocate(count - released))
        tables.num_slots = count * self.block_size
        if self.grow(tables, num_tokens) is None:
            raise EngineError("the KV pool lacks blocks that it said were free")
        return Start(tuple([tuple(table) for table in tables.blocks]))

    def held(self, tables: BlockTables, num_tokens: int) -> NewBlocks:
        """The blocks of the first `num_tokens` tokens, per group, without those given back."""
        count = self._blocks(num_tokens)
        return tuple([tuple(filter(None, table[:count])) for table in tables.blocks])

    def _has_room(self, tables: BlockTables, prefix: Prefix, num_known: int, chunk: int) -> bool:
        """A cached block that is shared is not free any more, and needs no new one."""
        needed = self._blocks(num_known)
        wanted = {group: self._hold(tables, needed) for group in self._full}
        wanted.update((group, min(needed, self._blocks(window + chunk - 2) + 1)) for group, window in self._windows)
        for group, pool in enumerate(self.pools):
            shared = [block for block in prefix.blocks[group] if block != NULL_BLOCK]
            revived = sum(pool.references(block) == 0 for block in shared)
            if pool.num_free - revived < wanted[group] - len(shared):
                return False
        return True

    def _hold(self, tables: BlockTables, needed: int) -> int:
        return blocks_to_hold(self._allocation, needed, self._blocks(tables.limit), self._longest)

    def grow(self, tables: BlockTables, num_tokens: int) -> NewBlocks | None:
        """Make the tables cover `num_tokens` tokens. Returns the new blocks per group, None if a pool lacks them.

        Nothing changes when it returns None.
        """
        if num_tokens <= tables.num_slots:
            return self.nothing
        count = self._blocks(num_tokens - tables.num_slots)
        missing = [count] * len(self.pools)
        if self._allocation != "paged":
            for group in self._full:
                held = len(tables.blocks[group]) + len(tables.reserved[group])
                missing[group] = max(0, self._hold(tables, self._blocks(num_tokens)) - held)
        for pool, number in zip(self.pools, missing, strict=True):
            if pool.num_free < number:
                return None
        new = tuple([self._take(tables, group, number, count) for group, number in enumerate(missing)])
        tables.num_slots += count * self.block_size
        return new

    def _take(self, tables: BlockTables, group: int, missing: int, count: int) -> tuple[int, ...]:
        """Put `count` blocks into a table: reserved ones, after `missing` more were reserved."""
        reserved = tables.reserved[group]
        reserved.extend(self.pools[group].allocate(missing))
        new = tuple(reserved[:count])
        del reserved[:count]
        tables.blocks[group].extend(new)
        return new

    def publish(self, tables: BlockTables, num_computed: int) -> None:
        """Let others share the full blocks among the first `num_computed` tokens, which are computed for good."""
        full = num_computed // self.block_size
        if not self._prefix_caching or full <= tables.num_published:
            return
        for pool, table in zip(self.pools, tables.blocks, strict=True):
            for index in range(tables.num_published, full):
                if table[index] != NULL_BLOCK:
                    pool.index.add(tables.chain, index, table[index])
        tables.num_published = full

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
        """Give everything back; the tables are empty again afterwards. Idempotent.

        The last block goes first, so that of a cached text the end is evicted before the beginning.
        """
        for group, (pool, table) in enumerate(zip(self.pools, tables.blocks, strict=True)):
            pool.release(reversed(table))
            pool.release(tables.reserved[group])
            table.clear()
            tables.reserved[group].clear()
            tables.num_released[group] = 0
        tables.num_slots = 0
        tables.num_published = 0

    def usage(self) -> tuple[GroupUsage, ...]:
        """Per group, in group order. A snapshot."""
        return tuple(
            [GroupUsage(pool.num_used, pool.num_cached, pool.num_free - pool.num_cached) for pool in self.pools]
        )

    def slots(self, live: Iterable[tuple[BlockTables, int]]) -> SlotUsage:
        """What the held token slots are for, from every live sequence's tables and computed tokens."""
        partial = reserved = over = 0
        for tables, num_computed in live:
            later = max(0, tables.limit - tables.num_slots)
            partial += (tables.num_slots - num_computed) * sum(map(bool, tables.blocks))
            for blocks in tables.reserved:
                held = len(blocks) * self.block_size
                reserved += min(held, later)
                over += max(0, held - later)
        total = sum(pool.num_used for pool in self.pools) * self.block_size
        return SlotUsage(total - partial - reserved - over, partial, reserved, over)

    def check(self, live: Iterable[BlockTables]) -> None:
        """Recount everything from the tables of all live sequences. O(all blocks).

        Raises EngineError on any mismatch: used + cached + free = total, references = pointers from live tables, tables
        as long as their slots, released entries null and no other, keys those of the tokens.
        """
        sequences = list(live)
        for tables in sequences:
            self._check_shape(tables)
            tables.chain.check()
        for group, pool in enumerate(self.pools):
            held = [block for tables in sequences for block in (*tables.blocks[group], *tables.reserved[group])]
            pool.check(held)

    def _check_shape(self, tables: BlockTables) -> None:
        for table, released in zip(tables.blocks, tables.num_released, strict=True):
            if len(table) * self.block_size != tables.num_slots:
                raise EngineError(f"a table of {len(table)} KV blocks for {tables.num_slots} token slots")
            if any(table[:released]) or NULL_BLOCK in table[released:]:
                raise EngineError("a KV table points at the null block where it should not, or the other way round")

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _run_lengths(blocks: Sequence[int]) -> list[int]:
    """At index i: how many of blocks[:i], counted from its end, are not null."""
    runs = [0]
    for block in blocks:
        runs.append(0 if block == NULL_BLOCK else runs[-1] + 1)
    return runs
