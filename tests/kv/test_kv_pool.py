"""BlockPool: order, references, and that its own check finds what is wrong."""

import pytest

from yeoul.errors import EngineError
from yeoul.kv.pool import BlockPool


def test_null_block_is_never_allocated_and_capacity_leaves_it_out():
    pool = BlockPool(5)
    assert pool.capacity == 4
    assert pool.allocate(4) == (1, 2, 3, 4)
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_freed_blocks_are_reused_last():
    pool = BlockPool(5)
    first, second = pool.allocate(2)
    pool.release([second, first])
    assert pool.allocate(4) == (3, 4, second, first)


def test_too_many_blocks_are_refused_and_nothing_is_taken():
    pool = BlockPool(4)
    with pytest.raises(EngineError, match="4 KV blocks wanted, 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_block_is_free_when_its_last_reference_goes():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.retain(block)
    pool.release([block])
    assert pool.references(block) == 1
    assert pool.num_used == 1
    pool.release([block])
    assert pool.num_used == 0


def test_double_free_and_retaining_a_free_block_raise():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.release([block, 0])
    with pytest.raises(EngineError, match="freed twice"):
        pool.release([block])
    with pytest.raises(EngineError, match="not in use"):
        pool.retain(block)
    with pytest.raises(EngineError, match="not in use"):
        pool.retain(0)


def test_check_finds_leaks_and_strangers():
    pool = BlockPool(4)
    held = pool.allocate(2)
    pool.check(held)
    with pytest.raises(EngineError, match="live sequences hold 0"):
        pool.check(held[:1])
    with pytest.raises(EngineError, match="live sequences hold 2"):
        pool.check([*held, held[0]])
    with pytest.raises(EngineError, match="block 3 has 0 references"):
        pool.check([*held, 3])


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_of_only_the_null_block_is_refused(num_blocks):
    with pytest.raises(ValueError, match="null block"):
        BlockPool(num_blocks)
