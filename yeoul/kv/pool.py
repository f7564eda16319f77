"""BlockPool: the block ids of one KV group, which are free and how often each is referenced.

Owns ids and counts only. Must not know tensors, sequences or tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from yeoul.errors import EngineError
from yeoul.step import NULL_BLOCK


class BlockPool:
    """Ids 1 .. num_blocks - 1 in a first-in first-out free list; block 0 is the null block and is never handed out.

    First-in first-out, so that a freed block keeps its contents as long as possible (a prefix index can revive it) and
    that a block used after it was freed is found by poisoning, not hidden by immediate reuse.
    """

    __slots__ = ("_free", "_references", "capacity")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs the null block and at least one more, got {num_blocks}")
        self.capacity = num_blocks - 1
        self._free = deque(range(1, num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.capacity - len(self._free)

    def references(self, block: int) -> int:
        """How often a block is referenced; 0 if it is free."""
        return self._references[block]

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks with one reference each. Raises EngineError, taking nothing, when fewer are free."""
        if count > len(self._free):
            raise EngineError(f"{count} KV blocks wanted, {len(self._free)} free")
        blocks = tuple([self._free.popleft() for _ in range(count)])
        for block in blocks:
            self._references[block] = 1
        return blocks

    def retain(self, block: int) -> None:
        """Add a reference to a block that somebody holds. Raises EngineError for a free or null block."""
        if self._references[block] == 0:
            raise EngineError(f"KV block {block} is not in use")
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; null blocks are skipped. Raises EngineError for a block that is free."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._references[block] == 0:
                raise EngineError(f"KV block {block} freed twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check(self, held: Iterable[int]) -> None:
        """Recount from `held`: every block id that a live table points at, once per reference.

        Raises EngineError unless references equal the recount and the free list is exactly the rest.
        """
        counted = Counter(block for block in held if block != NULL_BLOCK)
        free = set(self._free)
        if len(free) != len(self._free) or NULL_BLOCK in free:
            raise EngineError("the KV free list holds a block twice or the null block")
        for block, references in enumerate(self._references):
            if references != counted[block]:
                raise EngineError(f"KV block {block} has {references} references; live sequences hold {counted[block]}")
            if block != NULL_BLOCK and (references == 0) != (block in free):
                raise EngineError(
                    f"KV block {block} with {references} references is on the wrong side of the free list"
                )
