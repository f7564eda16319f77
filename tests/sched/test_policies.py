"""Policies: who is admitted, who is preempted, who may join a batch, and that nobody starves."""

import pytest

from yeoul.kv.manager import KVManager
from yeoul.sched.policies import Policies
from yeoul.sched.scheduler import Scheduler
from yeoul.sched.sequence import Sequence
from yeoul.step import RowResult, StepResult
from yeoul.types import KVKind, KVSpec, Request, SamplingParams

FULL = KVSpec(KVKind.FULL, 1, 8, 8)


class Kit:
    """A scheduler with policies; every step takes one second of its clock."""

    def __init__(self, *, blocks=65, seqs=4, budget=64, allocation="paged", caching=False, **policies):
        self.kv = KVManager([FULL], [blocks], 16, prefix_caching=caching, allocation=allocation, max_model_len=512)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=512,
            policies=Policies(**policies),
        )
        self.count = 0
        self.now = 0.0

    def add(self, prompt, *, priority=0, n=1, max_tokens=8, **more):
        tokens = list(prompt) if not isinstance(prompt, int) else [self.count] * prompt
        params = SamplingParams(max_tokens=max_tokens, n=n, **more)
        request = Request(request_id=f"r{self.count}", prompt_token_ids=tokens, params=params, priority=priority)
        sequences = [Sequence(request, index, 5, self.count + index, self.now) for index in range(n)]
        for sequence in sequences:
            sequence.siblings = sequences
            self.scheduler.add(sequence)
        self.count += n
        return sequences if n > 1 else sequences[0]

    def run(self):
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.ran = list(self.scheduler.scheduled)
        self.commit(plan)
        return plan

    def commit(self, plan):
        rows = tuple(RowResult((7,) if row.sample else ()) for row in plan.rows)
        self.scheduler.commit(plan, StepResult(plan.step_id, rows, 0.0, 0.0))
        self.scheduler.check()

    def run_until_done(self, limit=500):
        started = []
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.run()
            started += self.scheduler.first_scheduled
        assert not self.scheduler.has_work
        assert self.kv.usage()[0].used == 0
        return started


def test_fcfs_is_the_order_of_arrival():
    kit = Kit(seqs=1)
    sequences = [kit.add(10, priority=-i) for i in range(4)]
    assert kit.run_until_done() == sequences


def test_priority_comes_before_arrival_and_lower_values_come_first():
    kit = Kit(seqs=1, order="priority")
    late, first, middle, tie = (kit.add(10, priority=priority) for priority in (5, -1, 2, 2))
    assert kit.run_until_done() == [first, middle, tie, late]


def test_shortest_prompt_comes_first():
    kit = Kit(seqs=1, order="shortest_prompt")
    long, short, middle = kit.add(50), kit.add(5), kit.add(20)
    assert kit.run_until_done() == [short, middle, long]


def test_longest_prefix_comes_first():
    kit = Kit(seqs=1, order="longest_prefix", caching=True)
    kit.add(range(100, 149))
    kit.run_until_done()
    cold, little, much = kit.add(range(40)), kit.add([*range(100, 117), 1, 2]), kit.add(range(100, 140))
    assert kit.run_until_done() == [much, little, cold]
    assert (much.num_cached_tokens, little.num_cached_tokens, cold.num_cached_tokens) == (32, 16, 0)


@pytest.mark.parametrize("order", ["priority", "shortest_prompt", "longest_prefix"])
def test_a_stream_of_better_requests_starves_nobody(order):
    """One that every order would put last, and a better one in every step: it starts when it is old enough."""
    kit = Kit(seqs=1, order=order, ageing_seconds=30.0, caching=True)
    kit.add(range(100, 133), priority=0, max_tokens=1)
    kit.run_until_done()
    poor = kit.add([999] * 60, priority=9)
    arrived = kit.now
    while poor.first_scheduled_at is None:
        kit.add(range(100, 133), priority=0, max_tokens=1)
        kit.run()
        assert kit.now < arrived + 40
    assert poor.first_scheduled_at >= arrived + 20  # It did wait: the stream was really better.


@pytest.mark.parametrize("victim", ["latest", "lowest_priority"])
def test_the_victim_is_who_the_policy_says(victim):
    kit = Kit(blocks=7, seqs=3, victim=victim)
    low, high, latest = kit.add(30, priority=9, max_tokens=40), kit.add(30, priority=1), kit.add(30, priority=2)
    while not kit.scheduler.preempted:
        kit.run()
    expected = low if victim == "lowest_priority" else latest
    assert [lost.sequence for lost in kit.scheduler.preempted][:1] == [expected]
    assert kit.scheduler.preempted[0].needed_by in (low, high)
    assert kit.scheduler.counters.lost_tokens > 0
    kit.run_until_done()


def test_a_victim_that_was_granted_a_row_before_gives_it_back():
    kit = Kit(blocks=5, seqs=2, victim="lowest_priority")
    low, high = kit.add(20, priority=5), kit.add(32, priority=1)
    kit.run()
    kit.run()  # `low`, the first of the list, needs nothing; `high` needs a third block.
    assert [lost.sequence for lost in kit.scheduler.preempted] == [low]
    assert kit.ran == [high] and kit.scheduler.waiting[0] is low and low.num_scheduled_tokens == 0
    kit.run_until_done()


def test_nobody_starves_as_a_victim_either():
    kit = Kit(blocks=7, seqs=3, order="priority", victim="lowest_priority", ageing_seconds=20.0)
    poor = kit.add(40, priority=9, max_tokens=30)
    for _ in range(150):
        kit.add(30, priority=0, max_tokens=20)
        kit.run()
        if poor.finish_reason is not None:
            break
    assert poor.finish_reason is not None


def test_static_batches_take_nobody_in_until_all_are_done():
    kit = Kit(seqs=2, batching="static")
    first, second, third = kit.add(8, max_tokens=2), kit.add(8, max_tokens=6), kit.add(8, max_tokens=2)
    kit.run()
    assert kit.ran == [first, second]
    for _ in range(5):
        kit.run()
        assert third not in kit.ran
        assert kit.scheduler.wait_reason == "batch"
    kit.run()
    assert kit.ran == [third] and first.finish_reason is not None
    late = kit.add(8)
    kit.run()
    assert late not in kit.ran
    kit.run_until_done()


def test_a_static_batch_fills_over_several_steps_when_prompts_are_long():
    kit = Kit(seqs=3, batching="static", budget=16)
    sequences = [kit.add(20) for _ in range(4)]
    for _ in range(4):
        kit.run()
    assert set(kit.scheduler.running) == set(sequences[:3])
    kit.run()
    assert kit.scheduler.wait_reason == "batch"
    kit.run_until_done()


def test_prefill_first_computes_whole_prompts_before_any_further_token():
    kit = Kit(budget=32, batching="prefill_first")
    old = kit.add(8)
    kit.run()
    kit.run()
    tokens = old.num_tokens
    first, second, long = kit.add(20), kit.add(20), kit.add(50)
    kit.run()
    assert kit.ran == [first]  # The second does not fit whole.
    kit.run()
    assert kit.ran == [second]
    kit.run()
    assert kit.ran == [long] and long.num_computed_tokens == 32  # Longer than any step: it has to come in parts.
    kit.run()
    assert kit.ran == [long] and old.num_tokens == tokens
    kit.run()
    assert set(kit.ran) == {old, first, second, long}
    kit.run_until_done()


@pytest.mark.parametrize("batching", ["continuous", "prefill_first", "static"])
@pytest.mark.parametrize("order", ["fcfs", "priority", "shortest_prompt", "longest_prefix"])
@pytest.mark.parametrize("victim", ["latest", "lowest_priority"])
def test_all_finish_when_memory_is_short(batching, order, victim):
    kit = Kit(blocks=7, budget=16, seqs=5, batching=batching, order=order, victim=victim, caching=True)
    for i in range(10):
        kit.add(10 + 4 * i, priority=i % 3, max_tokens=20, n=1 + i % 3)
    kit.run_until_done(3000)
    assert kit.scheduler.counters.preemptions > 0
    assert kit.scheduler.counters.generation_tokens == 20 * kit.count


def test_the_others_of_n_share_the_prompt_and_copy_the_block_both_write_in():
    kit = Kit(seqs=8)
    first, second, third = kit.add(40, n=3)
    kit.run()
    assert kit.ran == [first] and kit.scheduler.wait_reason == "fork"
    plan = kit.run()
    assert kit.ran == [first, second, third]
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(40, 1), (39, 1), (39, 1)]
    assert plan.rows[1].new_blocks == ((1, 2, 4),) and plan.rows[2].new_blocks == ((1, 2, 5),)
    assert [(copy.source, copy.target) for copy in plan.block_copies] == [(3, 4), (3, 5)]
    assert kit.kv.usage()[0].used == 5 and kit.scheduler.counters.forks == 2
    assert kit.scheduler.counters.prompt_tokens == 40
    kit.run_until_done()


@pytest.mark.parametrize(("prompt", "copies"), [(1, 0), (2, 1), (16, 1), (17, 0), (33, 0)])
def test_a_fork_copies_only_where_a_block_is_partly_shared(prompt, copies):
    kit = Kit()
    kit.add(prompt, n=2)
    kit.run()
    assert len(kit.run().block_copies) == copies
    kit.run_until_done()


def test_without_fork_everyone_computes_the_prompt():
    kit = Kit(fork=False)
    kit.add(20, n=2)
    plan = kit.run()
    assert [row.num_tokens for row in plan.rows] == [20, 20] and kit.scheduler.counters.forks == 0


def test_whoever_wants_something_of_the_prompt_itself_computes_all_of_it():
    kit = Kit(caching=True)
    kit.add(range(40))
    kit.run_until_done()
    kit.add(range(40), n=2, prompt_logprobs=1)
    assert [(row.start, row.num_tokens) for row in kit.run().rows] == [(0, 40), (0, 24)]
    assert kit.scheduler.counters.forks == 0
    kit.run_until_done()


def test_when_the_first_of_n_is_gone_the_others_start_without_it():
    kit = Kit()
    first, second = kit.add(40, n=2, max_tokens=1)
    kit.run()
    assert first.finish_reason is not None
    kit.run()
    assert kit.ran == [second]
    kit.run_until_done()


@pytest.mark.parametrize(
    ("allocation", "used", "slots"),
    [
        ("paged", 2, (20, 12, 0, 0)),
        ("reserve_exact", 4, (20, 12, 30, 2)),
        ("reserve_max", 32, (20, 12, 30, 450)),
        ("pow2", 2, (20, 12, 0, 0)),
    ],
)
def test_allocation_policies_and_what_they_waste(allocation, used, slots):
    kit = Kit(allocation=allocation)
    kit.add(20, max_tokens=42)
    kit.run()
    assert kit.kv.usage()[0].used == used
    usage = kit.scheduler.slots()
    assert (usage.computed, usage.partial, usage.reserved, usage.over_reserved) == slots
    kit.run_until_done()


def test_pow2_doubles():
    kit = Kit(allocation="pow2")
    kit.add(30, max_tokens=100)
    held = set()
    while kit.scheduler.has_work:
        kit.run()
        held.add(kit.kv.usage()[0].used)
    assert held == {0, 2, 4, 8}


def test_reservations_keep_others_out_instead_of_preempting_them():
    for allocation, running in (("paged", 4), ("reserve_exact", 2), ("reserve_max", 1)):
        kit = Kit(blocks=33, allocation=allocation)
        for _ in range(4):
            kit.add(16, max_tokens=200)
        kit.run()
        assert len(kit.scheduler.running) == running
