"""SwapSpace: how much of the memory for swapped-out KV is taken, and by whom.

Owns handles and sums. Must not know where the bytes are: executors keep them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from yeoul.errors import EngineError


class Swapped(msgspec.Struct, frozen=True):
    """A sequence's KV of positions 0 .. num_tokens - 1, as far as it is still needed, outside the pools."""

    handle: int
    num_tokens: int


class SwapSpace:
    """Bytes up to a limit, by handle. Handles are never used twice."""

    def __init__(self, capacity: int, block_bytes: Sequence[int]) -> None:
        """`capacity` in bytes; `block_bytes` per KV group."""
        self.capacity = capacity
        self._block_bytes = tuple(block_bytes)
        self._sizes: dict[int, int] = {}
        self._next_handle = 0
        self.used = 0
        """Bytes."""

    def take(self, blocks: Sequence[Sequence[int]]) -> int | None:
        """A handle for these blocks, per KV group; None if they do not fit any more."""
        size = sum(len(ids) * each for ids, each in zip(blocks, self._block_bytes, strict=True))
        if self.used + size > self.capacity:
            return None
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._sizes[handle] = size
        self.used += size
        return handle

    def give_back(self, handle: int) -> None:
        """The bytes are free again. Raises EngineError for a handle that is not taken."""
        if handle not in self._sizes:
            raise EngineError(f"swap handle {handle} is not taken")
        self.used -= self._sizes.pop(handle)

    def check(self, handles: Sequence[int]) -> None:
        """Raises EngineError unless exactly these handles are taken and their sizes add up."""
        if sorted(handles) != sorted(self._sizes) or self.used != sum(self._sizes.values()):
            raise EngineError(f"swap space is taken by {sorted(self._sizes)}, sequences hold {sorted(handles)}")
