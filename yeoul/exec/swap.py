"""Swapping on the executor's side: blocks that leave the pools, and come back as they were.

Owns the bytes of swapped-out KV, in memory or in files. Must not know sequences, nor an executor's layout of blocks.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from yeoul.errors import ConfigError, EngineError
from yeoul.exec.kv_wire import decode, encode
from yeoul.step import SwapIn, SwapOut

Array = np.ndarray

log = logging.getLogger(__name__)


class BlockAccess(Protocol):
    """What swapping needs of an executor: blocks in the layout of `kv_wire`, uint8 [blocks, layers, bytes]."""

    def read_blocks(self, group: int, blocks: Sequence[int]) -> tuple[Array, Array]:
        """Keys and values of some blocks of a KV group."""
        ...

    def write_blocks(self, group: int, blocks: Sequence[int], keys: Array, values: Array) -> None:
        """Put back what `read_blocks` gave."""
        ...


class SwapStore:
    """Bytes by handle: in memory, or each in a file of a folder that only its owner can read."""

    def __init__(self, folder: str | None = None) -> None:
        """Raises ConfigError for a folder that cannot be written to."""
        self._memory: dict[int, bytes] = {}
        self._folder = None if folder is None else _own_folder(folder)
        self._is_full = False

    def put(self, handle: int, data: bytes) -> None:
        """Keep bytes. A full disk does not lose them: they stay in memory, and so do all later ones."""
        if self._folder is not None and not self._is_full:
            try:
                (self._folder / str(handle)).write_bytes(data)
                return
            except OSError as error:
                log.error("the swap folder cannot be written to: %s; swapping to memory from here on", error.strerror)
                self.drop(handle)
                self._is_full = True
        self._memory[handle] = data

    def take(self, handle: int) -> bytes:
        """The bytes, which are forgotten. Raises EngineError for an unknown handle or a file that cannot be read."""
        if handle in self._memory:
            return self._memory.pop(handle)
        try:
            data = (self._folder / str(handle)).read_bytes() if self._folder is not None else None
        except OSError as error:
            raise EngineError(f"swapped KV cannot be read: {error.strerror}") from error
        if data is None:
            raise EngineError(f"nothing was swapped out under {handle}")
        self.drop(handle)
        return data

    def drop(self, handle: int) -> None:
        """Forget a handle, if it is known."""
        self._memory.pop(handle, None)
        if self._folder is not None:
            (self._folder / str(handle)).unlink(missing_ok=True)

    def close(self) -> None:
        """Forget everything. Idempotent."""
        self._memory.clear()
        if self._folder is not None:
            for path in self._folder.iterdir():
                path.unlink()
            self._folder.rmdir()
            self._folder = None


def _own_folder(folder: str) -> Path:
    try:
        os.makedirs(folder, exist_ok=True)
        return Path(tempfile.mkdtemp("", "yeoul-swap-", folder))
    except OSError as error:
        raise ConfigError(
            f"the swap folder {folder} cannot be used: {error.strerror}", hint="--swap-dir FOLDER", param="swap_dir"
        ) from error


class Swapper:
    """Carries out a plan's swaps on one executor's blocks."""

    def __init__(self, access: BlockAccess, numerics: bytes, store: SwapStore) -> None:
        """`numerics`: what `kv_wire.fingerprint` says of the executor."""
        self._access = access
        self._numerics = numerics
        self._store = store

    def out(self, dropped: Sequence[int], swaps: Sequence[SwapOut]) -> None:
        """Forget what is dropped, then keep what goes out."""
        for handle in dropped:
            self._store.drop(handle)
        for swap in swaps:
            groups = [self._access.read_blocks(group, blocks) for group, blocks in enumerate(swap.blocks)]
            self._store.put(swap.handle, encode(self._numerics, groups))

    def back(self, swaps: Sequence[SwapIn]) -> frozenset[int]:
        """Write what comes back. Returns the slots for which that failed; the log says why."""
        failed: set[int] = set()
        for swap in swaps:
            try:
                self._write(swap)
            except EngineError as error:
                log.error("slot %d: %s", swap.slot, error)
                failed.add(swap.slot)
        return frozenset(failed)

    def _write(self, swap: SwapIn) -> None:
        groups = decode(self._numerics, self._store.take(swap.handle))
        if [len(keys) for keys, _ in groups] != [len(blocks) for blocks in swap.blocks]:
            raise EngineError("swapped KV has another number of blocks than the plan")
        for group, (blocks, (keys, values)) in enumerate(zip(swap.blocks, groups, strict=True)):
            self._access.write_blocks(group, blocks, keys, values)

    def close(self) -> None:
        """Forget everything. Idempotent."""
        self._store.close()
