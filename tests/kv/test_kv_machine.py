"""A state machine over everything the manager can do at once: caching, sharing, windows, every allocation policy."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from yeoul.config import KV_ALLOCATIONS
from yeoul.kv.manager import KVManager
from yeoul.types import KVKind, KVSpec

FULL = KVSpec(KVKind.FULL, 1, 8, 8)
WINDOW = KVSpec(KVKind.WINDOW, 1, 8, 8, window=24)
LONGEST = 120


class Live:
    """A sequence of the model: its tokens, how many are computed, its tables."""

    def __init__(self, tokens, tables):
        self.tokens, self.tables, self.computed = tokens, tables, 0


class CachingMachine(RuleBasedStateMachine):
    """`contents` says what each block holds, written by whoever computes; a shared block must hold the right tokens."""

    def __init__(self):
        super().__init__()
        self.live = []
        self.contents = {}

    @initialize(allocation=st.sampled_from(KV_ALLOCATIONS), blocks=st.integers(10, 24))
    def begin(self, allocation, blocks):
        self.kv = KVManager(
            [FULL, WINDOW], [blocks, 12], 16, prefix_caching=True, allocation=allocation, max_model_len=LONGEST
        )

    @precondition(lambda self: len(self.live) < 5)
    @rule(
        text=st.integers(0, 2), length=st.integers(1, 90), chunk=st.integers(1, 40), salt=st.sampled_from([None, "s"])
    )
    def start(self, text, length, chunk, salt):
        tokens = [1000 * text + i for i in range(length)]
        tables = self.kv.open(tokens, salt=salt, limit=LONGEST)
        prefix = self.kv.match(tables, length)
        assert prefix.num_tokens < length and prefix.num_tokens % 16 == 0
        end = min(length, prefix.num_tokens + chunk)
        before = self.kv.usage()
        start = self.kv.start(tables, prefix, end, length, chunk)
        if start is None:
            assert self.kv.usage() == before and tables.blocks == [[], []]
            return
        entry = Live(tokens, tables)
        self.live.append(entry)
        entry.computed = prefix.num_tokens
        self.reads(entry)
        self.compute(entry, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 20))
    def go_on(self, data, count):
        entry = data.draw(st.sampled_from(self.live))
        end = min(entry.computed + count, LONGEST)
        if end > len(entry.tokens):
            entry.tokens.extend(range(len(entry.tokens), end))
        if self.kv.grow(entry.tables, end) is not None:
            self.compute(entry, end)

    def compute(self, entry, end):
        """Write every position's (token, position) where the tables say, then publish and release."""
        for group in (0, 1):
            for position in range(entry.computed, end):
                block = entry.tables.blocks[group][position // 16]
                assert self.kv.pools[group].references(block) == 1, "writes to a block that others see"
                self.contents[group, block, position % 16] = (tuple(entry.tokens[: position + 1]), position)
        entry.computed = end
        self.kv.publish(entry.tables, end)
        self.kv.release_window(entry.tables, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        entry = data.draw(st.sampled_from(self.live))
        self.live.remove(entry)
        self.kv.free(entry.tables)

    def reads(self, entry):
        """Everything that the next token sees holds what this sequence would have written."""
        for group, first in ((0, 0), (1, max(0, entry.computed - 24 + 1))):
            for position in range(first, entry.computed):
                block = entry.tables.blocks[group][position // 16]
                seen = self.contents[group, block, position % 16]
                assert seen == (tuple(entry.tokens[: position + 1]), position)

    @invariant()
    def books(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check([entry.tables for entry in self.live])
        for usage, pool in zip(self.kv.usage(), self.kv.pools, strict=True):
            assert usage.used + usage.cached + usage.free == pool.capacity
        for entry in self.live:
            self.reads(entry)

    def teardown(self):
        for entry in self.live:
            self.kv.free(entry.tables)
        if hasattr(self, "kv"):
            assert [usage.used for usage in self.kv.usage()] == [0, 0]


@pytest.mark.timeout(300)
def test_thousands_of_operations():
    run_state_machine_as_test(CachingMachine, settings=settings(max_examples=40, stateful_step_count=50, deadline=None))
