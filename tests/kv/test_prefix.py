"""Prefix caching without an engine: what a key is of, what is found, and what is evicted."""

import pytest

from yeoul.errors import EngineError
from yeoul.kv import prefix
from yeoul.kv.manager import KVManager
from yeoul.kv.prefix import KeyChain, root_key
from yeoul.types import KVKind, KVSpec

FULL = KVSpec(KVKind.FULL, 1, 8, 8)


def window_spec(window):
    return KVSpec(KVKind.WINDOW, 1, 8, 8, window=window)


class Kit:
    """A caching manager; `leave` computes a text, publishes it and goes; `found` says how much one would share."""

    def __init__(self, specs=(FULL,), blocks=(20,)):
        self.kv = KVManager(specs, blocks, 16, prefix_caching=True)
        self.live = []

    def compute(self, tokens, chunk=16, salt=None):
        tables = self.kv.open(list(tokens), salt=salt)
        match = self.kv.match(tables, len(tokens))
        assert self.kv.start(tables, match, match.num_tokens + 1, len(tokens), chunk) is not None
        for end in range(match.num_tokens + 1, len(tokens) + 1):
            assert self.kv.grow(tables, end) is not None
            self.kv.publish(tables, end)
            self.kv.release_window(tables, end)
        self.live.append(tables)
        self.kv.check(self.live)
        return tables, match.num_tokens

    def leave(self, tokens, **options):
        tables, found = self.compute(tokens, **options)
        self.live.remove(tables)
        self.kv.free(tables)
        self.kv.check(self.live)
        return found

    def found(self, tokens, salt=None):
        return self.kv.match(self.kv.open(list(tokens), salt=salt), len(tokens)).num_tokens


@pytest.mark.parametrize(("length", "found"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (40, 32)])
def test_whole_blocks_are_found_and_never_the_last_token(length, found):
    kit = Kit()
    kit.leave(range(length))
    assert kit.found(range(length)) == found


def test_only_the_common_beginning_is_found():
    kit = Kit()
    kit.leave(range(64))
    assert kit.found([*range(32), 999, *range(33, 64)]) == 32
    assert kit.found([999, *range(1, 64)]) == 0
    assert kit.found(range(16, 64)) == 0  # The same tokens elsewhere are something else.


def test_shared_blocks_are_counted_and_stay_when_one_goes():
    kit = Kit()
    first, _ = kit.compute(range(40))
    second, found = kit.compute(range(40))
    assert found == 32 and second.blocks[0][:2] == first.blocks[0][:2]
    assert kit.kv.pools[0].references(first.blocks[0][0]) == 2
    kit.live.remove(first)
    kit.kv.free(first)
    kit.kv.check(kit.live)
    assert kit.kv.usage()[0].used == 3 and kit.found(range(40)) == 32


def test_a_partial_block_is_never_published():
    kit = Kit()
    kit.leave(range(31))
    assert kit.found(range(31)) == 16 and kit.kv.usage()[0].cached == 1


def test_salts_and_no_salt_are_kept_apart():
    kit = Kit()
    salts = (None, "", "s", "none", "salts")
    for salt in salts:
        assert kit.leave(range(33), salt=salt) == 0
    assert [kit.found(range(33), salt=salt) for salt in salts] == [32] * len(salts)
    assert kit.found(range(33), salt="other") == 0
    assert len({root_key(salt) for salt in salts}) == len(salts)


def test_equal_keys_of_other_tokens_are_no_hit(monkeypatch):
    monkeypatch.setattr(prefix, "block_key", lambda parent, tokens: b"always the same")
    kit = Kit()
    kit.leave(range(17))
    assert kit.found(range(17)) == 16
    assert kit.found(range(100, 117)) == 0


def test_the_least_recently_used_text_is_evicted_from_its_end():
    kit = Kit(blocks=(9,))
    kit.leave(range(100, 149))
    kit.leave(range(200, 249))
    kit.leave(range(100, 149))  # Used again: now the other one is older.
    assert kit.kv.usage()[0].cached == 6 and kit.kv.usage()[0].free == 2
    kit.leave(range(300, 349))
    assert kit.found(range(100, 149)) == 48
    assert kit.found(range(200, 249)) == 16
    kit.leave(range(400, 433))
    assert kit.found(range(200, 249)) == 0 and kit.found(range(100, 149)) == 32


def test_cached_blocks_do_not_keep_anybody_out():
    kit = Kit(blocks=(9,))
    kit.leave(range(100, 228))
    assert kit.kv.usage()[0].cached == 8
    assert kit.leave(range(300, 428)) == 0
    kit.leave(range(300, 428))


def test_room_for_a_start_counts_shared_blocks_once():
    kit = Kit(blocks=(6,))
    kit.leave(range(48))  # Three cached blocks, two blank ones.
    tables = kit.kv.open(list(range(96)))
    assert kit.kv.start(tables, kit.kv.match(tables, 96), 64, 96, 32) is None
    kit.kv.check([])
    tables = kit.kv.open(list(range(80)))
    start = kit.kv.start(tables, kit.kv.match(tables, 80), 80, 80, 32)
    assert len(start.blocks[0]) == 5 and kit.kv.usage()[0].used == 5
    kit.kv.check([tables])


@pytest.mark.parametrize("window", [5, 16, 17, 32, 40])
def test_a_window_group_needs_only_its_last_window(window):
    kit = Kit((FULL, window_spec(window)), (40, 40))
    kit.compute(range(200))
    tables, found = kit.compute(range(200))
    assert found == 192
    null = [block == 0 for block in tables.blocks[1]]
    assert null[: (200 - window + 1) // 16] == [True] * ((200 - window + 1) // 16)
    assert not any(null[(200 - window + 1) // 16 :])


def test_a_hit_is_as_long_as_every_group_allows():
    """The window pool is so small that only the last blocks of the last text are left in it."""
    kit = Kit((FULL, window_spec(32)), (60, 6))
    kit.leave(range(160))
    assert kit.found(range(160)) == 144
    assert kit.found([*range(100), 999, *range(59)]) == 0  # 96 tokens in the full group, none of the window's.
    assert kit.found([*range(150), 999]) == 144


def test_a_chain_finds_that_its_tokens_were_changed():
    tokens = list(range(40))
    chain = KeyChain(tokens, 16, None)
    chain.key(1)
    chain.check()
    tokens[20] = 999
    with pytest.raises(EngineError, match="block 1"):
        chain.check()


def test_without_caching_nothing_is_kept():
    kv = KVManager([FULL], [9], 16)
    tables = kv.open(list(range(40)))
    kv.start(tables, kv.match(tables, 40), 40, 40, 40)
    kv.publish(tables, 40)
    kv.free(tables)
    assert kv.match(tables, 40).num_tokens == 0 and kv.usage()[0].cached == 0
