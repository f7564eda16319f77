"""BlockPool: the block ids of one KV group: which are free, how often each is referenced, which hold a known prefix.

Owns ids and counts only. Must not know tensors, sequences or how a prefix is found.

    blank       never used, or used and not known: handed out first, in the order they came back
    cached      no reference, but the prefix index knows what it holds: evicted least recently used first
    used        at least one reference; the prefix index may know it too
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

from yeoul.errors import EngineError
from yeoul.kv.prefix import PrefixIndex
from yeoul.step import NULL_BLOCK


class BlockPool:
    """Ids 1 .. num_blocks - 1; block 0 is the null block and is never handed out.

    Blank blocks are first-in first-out, so that a block used after it was freed is found by poisoning, not hidden by
    immediate reuse. Cached blocks are an OrderedDict because a hit takes one out of the middle.
    """

    __slots__ = ("_blank", "_cached", "_references", "capacity", "index")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs the null block and at least one more, got {num_blocks}")
        self.capacity = num_blocks - 1
        self.index = PrefixIndex()
        """What the blocks of this group hold. A block that is handed out anew is forgotten there."""
        self._blank = deque(range(1, num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: blank and cached."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without a reference whose contents the prefix index knows."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.capacity - len(self._blank) - len(self._cached)

    def references(self, block: int) -> int:
        """How often a block is referenced; 0 if it is free."""
        return self._references[block]

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks with one reference each. Raises EngineError, taking nothing, when fewer are free."""
        if count > self.num_free:
            raise EngineError(f"{count} KV blocks wanted, {self.num_free} free")
        blocks = tuple([self._blank.popleft() if self._blank else self._evict() for _ in range(count)])
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self.index.forget(block)
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a block that somebody holds or that is cached. Raises EngineError for any other."""
        if self._references[block] == 0:
            if block not in self._cached:
                raise EngineError(f"KV block {block} is not in use")
            del self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; null blocks are skipped. Raises EngineError for a block that is free.

        Of blocks released together the first one is evicted first.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._references[block] == 0:
                raise EngineError(f"KV block {block} freed twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self.index:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def check(self, held: Iterable[int]) -> None:
        """Recount from `held`: every block id that a live table points at, once per reference.

        Raises EngineError unless references equal the recount, the blank and cached lists are exactly the rest, and a
        block is cached if and only if the index knows it and nobody holds it.
        """
        counted = Counter(block for block in held if block != NULL_BLOCK)
        free = set(self._blank) | set(self._cached)
        if len(free) != self.num_free or NULL_BLOCK in free:
            raise EngineError("the KV free list holds a block twice or the null block")
        self.index.check()
        for block, references in enumerate(self._references):
            if references != counted[block]:
                raise EngineError(f"KV block {block} has {references} references; live sequences hold {counted[block]}")
            if block != NULL_BLOCK and (references == 0) != (block in free):
                raise EngineError(
                    f"KV block {block} with {references} references is on the wrong side of the free list"
                )
            if (block in self._cached) != (references == 0 and block in self.index):
                raise EngineError(f"KV block {block} is cached and not in the prefix index, or the other way round")
