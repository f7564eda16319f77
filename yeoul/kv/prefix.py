"""Prefix caching: what a block's contents are called, and which block holds them.

Owns keys (a chain of SHA-256 over parent, token ids and salt) and the index of one KV group. Must not know references,
eviction or sequences. Keys of one sequence are the same in every group; who has which block is each group's business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from struct import pack

from yeoul.errors import EngineError

Tokens = tuple[int, ...]


def root_key(salt: str | None) -> bytes:
    """The parent of a sequence's first block. No salt and every salt are told apart by what comes before it."""
    kind = b"none" if salt is None else b"salt" + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"yeoul prefix 1 " + kind).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block's contents: SHA-256 of the parent's name and the token ids, 4 bytes each."""
    return hashlib.sha256(parent + pack(f"<{len(tokens)}I", *tokens)).digest()


class KeyChain:
    """The keys of one sequence's full blocks, computed as far as somebody asked. Tokens are only ever appended."""

    __slots__ = ("_block_size", "_keys", "_root", "_tokens")

    def __init__(self, tokens: Sequence[int], block_size: int, salt: str | None) -> None:
        """`tokens`: the sequence's own list, which may grow and must not change otherwise."""
        self._tokens = tokens
        self._block_size = block_size
        self._root = root_key(salt)
        self._keys: list[bytes] = []

    def tokens(self, index: int) -> Tokens:
        """Token ids of block `index`."""
        first = index * self._block_size
        return tuple(self._tokens[first : first + self._block_size])

    def key(self, index: int) -> bytes:
        """Key of block `index`, whose tokens must all be known."""
        while len(self._keys) <= index:
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(block_key(parent, self.tokens(len(self._keys))))
        return self._keys[index]

    def check(self) -> None:
        """Compute every key again. Raises EngineError if one is not that of the tokens."""
        parent = self._root
        for index, key in enumerate(self._keys):
            parent = block_key(parent, self.tokens(index))
            if parent != key:
                raise EngineError(f"the key of block {index} is not that of its tokens")


class PrefixIndex:
    """Which block of one KV group holds what. At most one block for each key, at most one key for each block."""

    __slots__ = ("_by_block", "_by_key")

    def __init__(self) -> None:
        self._by_key: dict[bytes, tuple[int, Tokens]] = {}
        self._by_block: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def find(self, chain: KeyChain, index: int) -> int | None:
        """The block that holds block `index` of a sequence; None if there is none.

        The tokens themselves are compared, so that two texts with one key could not share a block. The caller has found
        the blocks before, or needs none of them.
        """
        found = self._by_key.get(chain.key(index))
        if found is None or found[1] != chain.tokens(index):
            return None
        return found[0]

    def add(self, chain: KeyChain, index: int, block: int) -> None:
        """Note that `block` holds block `index` of a sequence, fully computed. A key that is known keeps its block."""
        key = chain.key(index)
        if key not in self._by_key and block not in self._by_block:
            self._by_key[key] = (block, chain.tokens(index))
            self._by_block[block] = key

    def forget(self, block: int) -> None:
        """The block is about to be overwritten."""
        del self._by_key[self._by_block.pop(block)]

    def check(self) -> None:
        """Raises EngineError unless keys and blocks map one to one."""
        if {block: key for key, (block, _) in self._by_key.items()} != self._by_block:
            raise EngineError("the prefix index names a block twice")
