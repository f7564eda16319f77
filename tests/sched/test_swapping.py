"""Preemption by swap: nothing is lost, the space is kept in order, and whoever cannot be swapped is recomputed."""

import pytest
from test_policies import Kit as PolicyKit

from yeoul.errors import EngineError
from yeoul.kv.swap import SwapSpace
from yeoul.sched.scheduler import Scheduler


class Kit(PolicyKit):
    def __init__(self, *, space=100, blocks=5, **options):
        super().__init__(blocks=blocks, **options)
        self.space = SwapSpace(space, [1])
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, swap_space=self.space
        )

    def run_until_preempted(self):
        while not self.scheduler.preempted:
            plan = self.run()
        return plan


def test_the_victim_goes_on_where_it_was():
    kit = Kit()
    old, new = kit.add(30), kit.add(30)
    plan = kit.run_until_preempted()
    (lost,) = kit.scheduler.preempted
    assert (lost.sequence, lost.num_lost_tokens, lost.num_swapped_tokens) == (new, 0, 32)
    assert [(swap.handle, swap.blocks) for swap in plan.swap_outs] == [(0, ((3, 4),))] and kit.space.used == 2
    assert new.num_computed_tokens == 0 and kit.scheduler.counters.swapped_tokens == 32
    while new.swapped is not None:
        plan = kit.run()
    assert old.finish_reason is not None
    (row,) = plan.rows
    assert (row.start, row.num_tokens, row.token_ids) == (32, 1, (7,)) and row.state is not None
    assert [(swap.handle, swap.slot, len(swap.blocks[0])) for swap in plan.swap_ins] == [(0, row.slot, 2)]
    assert kit.space.used == 0 and len(row.new_blocks[0]) == 3
    kit.run_until_done()
    assert kit.scheduler.counters.lost_tokens == 0


def test_without_room_the_victim_is_recomputed():
    kit = Kit(space=1)
    _, new = kit.add(30), kit.add(30)
    plan = kit.run_until_preempted()
    assert plan.swap_outs == () and new.swapped is None
    assert kit.scheduler.preempted[0].num_lost_tokens == 32
    kit.run_until_done()


def test_a_victim_of_whose_prompt_something_is_wanted_is_recomputed():
    kit = Kit()
    kit.add(30)
    new = kit.add(30, prompt_logprobs=0)
    plan = kit.run_until_preempted()
    assert plan.swap_outs == () and kit.scheduler.preempted[0].sequence is new
    kit.run_until_done()


def test_an_aborted_victim_is_dropped():
    kit = Kit()
    kit.add(30)
    new = kit.add(30)
    kit.run_until_preempted()
    kit.scheduler.abort(new)
    assert kit.space.used == 0
    assert kit.run().dropped_swaps == (0,)
    assert kit.run().dropped_swaps == ()
    kit.run_until_done()


def test_after_a_failed_step_nobody_relies_on_what_it_should_have_kept():
    kit = Kit()
    old, new = kit.add(30), kit.add(30)
    while True:
        kit.now += 1.0
        plan = kit.scheduler.schedule(kit.now)
        if plan.swap_outs:
            break
        kit.commit(plan)
    assert kit.scheduler.fail_step() == [old]
    kit.scheduler.check()
    assert new.swapped is None and kit.space.used == 0
    plan = kit.run()
    assert plan.dropped_swaps == (0,) and plan.rows[0].start == 0
    kit.run_until_done()


def test_a_failed_step_that_brought_somebody_back_drops_the_handle():
    kit = Kit()
    old, new = kit.add(30), kit.add(30)
    kit.run_until_preempted()
    kit.scheduler.abort(old)
    plan = kit.scheduler.schedule(9.0)
    assert plan.swap_ins
    assert kit.scheduler.fail_step() == [new]
    kit.add(5)
    assert kit.run().dropped_swaps == (0,)
    kit.run_until_done()


def test_the_space_refuses_what_is_not_its_own():
    space = SwapSpace(10, [2, 3])
    handle = space.take([(1, 2), (3,)])
    assert space.used == 7 and space.take([(1,), (2,)]) is None
    space.check([handle])
    with pytest.raises(EngineError, match="swap space"):
        space.check([])
    space.give_back(handle)
    with pytest.raises(EngineError, match="not taken"):
        space.give_back(handle)
