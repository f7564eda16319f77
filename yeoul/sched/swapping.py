"""Swapping: preemption that keeps the victim's KV outside the pools instead of computing it again.

Owns what the next plan swaps out, in and drops, and the space that takes. Must not know who is preempted, or why.
"""

from __future__ import annotations

from collections.abc import Iterable

from yeoul.kv.manager import KVManager
from yeoul.kv.swap import Swapped, SwapSpace
from yeoul.sched.sequence import Sequence
from yeoul.step import SwapIn, SwapOut


class Swapping:
    """Without a space nothing is ever swapped and all methods are cheap."""

    def __init__(self, kv: KVManager, space: SwapSpace | None) -> None:
        self._kv = kv
        self._space = space
        self.outs: list[SwapOut] = []
        self.ins: list[SwapIn] = []
        self.dropped: list[int] = []
        self._last_ins: list[SwapIn] = []

    @property
    def used(self) -> int:
        """Bytes."""
        return 0 if self._space is None else self._space.used

    def out(self, sequence: Sequence) -> bool:
        """Plan to keep a running sequence's computed tokens. False if there is no room for them, or there are none.

        Also False where something is wanted of the prompt: what was pooled of it ends with the stay.
        The caller frees the blocks right after; the plan copies them before anybody else writes.
        """
        num_tokens = sequence.num_computed_tokens
        if self._space is None or num_tokens == 0 or sequence.reads_prompt:
            return False
        blocks = self._kv.held(sequence.tables, num_tokens)
        handle = self._space.take(blocks)
        if handle is None:
            return False
        self.outs.append(SwapOut(handle, blocks))
        sequence.swapped = Swapped(handle, num_tokens)
        return True

    def back(self, sequence: Sequence) -> None:
        """Plan to bring a sequence's tokens into the blocks that it has now; it has a slot and no more in the space."""
        if sequence.swapped is not None and self._space is not None:
            blocks = self._kv.held(sequence.tables, sequence.swapped.num_tokens)
            self.ins.append(SwapIn(sequence.swapped.handle, sequence.slot, blocks))
            self._space.give_back(sequence.swapped.handle)
            sequence.swapped = None

    def drop(self, sequence: Sequence) -> None:
        """What was kept of a sequence is not wanted any more: it ended, or must compute again."""
        if sequence.swapped is not None and self._space is not None:
            self._space.give_back(sequence.swapped.handle)
            self.dropped.append(sequence.swapped.handle)
            sequence.swapped = None

    def planned(self) -> None:
        """The plan was made with all of it."""
        self._last_ins = self.ins
        self.outs, self.ins, self.dropped = [], [], []

    def step_failed(self, preempted: Iterable[Sequence]) -> None:
        """Nobody knows what the step kept or brought back: whoever it preempted has to compute again."""
        for sequence in preempted:
            self.drop(sequence)
        self.dropped.extend(swap.handle for swap in (*self._last_ins, *self.ins))
        self.outs, self.ins, self._last_ins = [], [], []

    def check(self, waiting: list[Sequence]) -> None:
        """Raises EngineError unless the space is taken by exactly these sequences' tokens."""
        if self._space is not None:
            self._space.check([one.swapped.handle for one in waiting if one.swapped is not None])
