"""StepSizes: how many tokens the engine's steps computed, counted by size. Owns the bounds; must not know metrics.

Kept by the engine rather than by an observer, because most steps of a long prompt tell nobody anything.
"""

from __future__ import annotations

from bisect import bisect_left

BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Inclusive upper bounds; one more bucket is open."""


class StepSizes:
    """One writer, the engine's thread; `snapshot` from any thread."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._total = 0

    def count(self, num_tokens: int) -> None:
        """A step computed this many tokens, of prompts and of replies."""
        self._counts[bisect_left(BOUNDS, num_tokens)] += 1
        self._total += num_tokens

    def snapshot(self) -> tuple[tuple[int, ...], int]:
        """(steps in each bucket, tokens of all of them)."""
        return tuple(self._counts), self._total
