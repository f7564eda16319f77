"""KVManager: a state machine against a model that recounts everything, and the edges of windows."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from yeoul.errors import EngineError
from yeoul.kv.manager import KVManager
from yeoul.types import KVKind, KVSpec

FULL = KVSpec(KVKind.FULL, 1, 8, 8)
WINDOW = 24


def window_spec(window: int) -> KVSpec:
    return KVSpec(KVKind.WINDOW, 1, 8, 8, window=window)


class ManagerMachine(RuleBasedStateMachine):
    """Sequences grow, compute, free; the model is (slots, computed tokens) per sequence."""

    def __init__(self):
        super().__init__()
        self.kv = KVManager([FULL, window_spec(WINDOW)], [20, 9], 16)
        """Without a prefix cache; test_kv_machine.py has the other techniques."""
        self.live = {}
        self.count = 0

    @precondition(lambda self: len(self.live) < 5)
    @rule()
    def open(self):
        self.live[self.count] = [self.kv.open(), 0, 0]
        self.count += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), chunk=st.integers(1, 50))
    def grow(self, data, chunk):
        entry = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        tables, computed, slots = entry
        free = [usage.free for usage in self.kv.usage()]
        missing = max(0, -(-(computed + chunk) // 16) - slots // 16)
        new = self.kv.grow(tables, computed + chunk)
        if new is None:
            assert min(free) < missing
            return
        assert [len(blocks) for blocks in new] == [missing, missing]
        assert all(0 not in blocks for blocks in new)
        entry[1] = computed + chunk
        entry[2] = slots + 16 * missing
        self.kv.release_window(tables, entry[1])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        tables, *_ = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.kv.free(tables)
        assert tables.blocks == [[], []]

    @invariant()
    def recount(self):
        self.kv.check([tables for tables, *_ in self.live.values()])
        full, window = self.kv.usage()
        assert (full.used + full.free, window.used + window.free) == (19, 8)
        assert full.used == sum(slots // 16 for _, _, slots in self.live.values())
        expected = sum(slots // 16 - max(0, computed - WINDOW + 1) // 16 for _, computed, slots in self.live.values())
        assert window.used == expected

    @invariant()
    def visible_blocks_are_held(self):
        for tables, computed, slots in self.live.values():
            first = max(0, computed - WINDOW + 1) // 16
            assert all(tables.blocks[1][first : slots // 16])
            assert not any(tables.blocks[1][:first])

    def teardown(self):
        for tables, *_ in self.live.values():
            self.kv.free(tables)
        assert [usage.used for usage in self.kv.usage()] == [0, 0]


ManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_state_machine = ManagerMachine.TestCase


def test_grow_returns_only_what_is_new_and_none_changes_nothing():
    kv = KVManager([FULL, FULL], [4, 3], 16)
    tables = kv.open()
    assert kv.grow(tables, 17) == ((1, 2), (1, 2))
    assert kv.grow(tables, 32) == ((), ())
    before = ([list(table) for table in tables.blocks], kv.usage())
    assert kv.grow(tables, 33) is None  # The first pool has one block left, the second none.
    assert ([list(table) for table in tables.blocks], kv.usage()) == before


@pytest.mark.parametrize(
    ("computed", "released"),
    [(0, 0), (23, 0), (38, 0), (39, 1), (54, 1), (55, 2), (64, 2)],  # The next token sees computed - 23 and later.
)
def test_window_release_keeps_exactly_what_the_next_token_sees(computed, released):
    kv = KVManager([window_spec(WINDOW)], [9], 16)
    tables = kv.open()
    kv.grow(tables, 64)
    kv.release_window(tables, computed)
    assert [block == 0 for block in tables.blocks[0]] == [i < released for i in range(4)]
    kv.check([tables])


def test_a_start_asks_a_window_group_for_the_window_and_a_chunk_only():
    def starts(spec, num_known, chunk):
        kv = KVManager([spec], [5], 16)
        tables = kv.open()
        return kv.start(tables, kv.match(tables, num_known), 1, num_known, chunk) is not None

    assert starts(window_spec(32), 1000, 17)  # 32 + 17 - 1 positions lie in at most 4 blocks.
    assert not starts(window_spec(32), 1000, 35)
    assert starts(window_spec(32), 64, 64)
    assert not starts(FULL, 65, 1)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 24, 32])
def test_max_chunk_never_exhausts_the_pool_of_a_lone_sequence(window):
    kv = KVManager([window_spec(window)], [5], 16)
    chunk = kv.max_chunk(1000, 4096)
    assert chunk >= 1
    tables, computed = kv.open(), 0
    for step in range(200):
        size = chunk if step % 3 else 1 + step % chunk
        assert kv.grow(tables, computed + size) is not None
        computed += size
        kv.release_window(tables, computed)
    kv.free(tables)


def test_limits_of_a_lone_sequence():
    kv = KVManager([FULL, window_spec(32)], [5, 5], 16)
    assert kv.max_tokens(1000) == 64
    assert kv.max_tokens(10) == 10
    assert kv.max_chunk(512, 64) == 512  # The window pool holds 64 tokens whole.
    assert kv.max_chunk(512, 65) == 18
    assert KVManager([window_spec(200)], [5], 16).max_chunk(512, 4096) < 1


def test_check_finds_a_sequence_that_is_missing_or_damaged():
    kv = KVManager([FULL, window_spec(WINDOW)], [9, 9], 16)
    tables = kv.open()
    kv.grow(tables, 48)
    with pytest.raises(EngineError, match="live sequences hold 0"):
        kv.check([])
    tables.blocks[0][1] = 0
    with pytest.raises(EngineError, match="null block"):
        kv.check([tables])
    tables.blocks[0].pop()
    with pytest.raises(EngineError, match="48 token slots"):
        kv.check([tables])


def test_free_is_idempotent_and_pools_must_match_groups():
    kv = KVManager([FULL], [3], 16)
    tables = kv.open()
    kv.grow(tables, 20)
    kv.free(tables)
    kv.free(tables)
    kv.check([])
    with pytest.raises(ValueError, match="2 pools for 1 KV groups"):
        KVManager([FULL], [3, 3], 16)
