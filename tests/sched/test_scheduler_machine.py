"""A state machine over the scheduler alone: whatever arrives, is aborted or fails, the books balance and work ends.

The scripted executor holds every plan to what it promised: contents of shared, copied and swapped blocks included.
"""

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
from scripted_executor import FULL, ScriptedExecutor, window_spec

from yeoul.config import BATCHINGS, KV_ALLOCATIONS, PREEMPTION_VICTIMS, SCHEDULING_POLICIES
from yeoul.kv.manager import KVManager
from yeoul.kv.swap import SwapSpace
from yeoul.sched.policies import Policies
from yeoul.sched.scheduler import Scheduler
from yeoul.sched.sequence import Sequence, SequenceStatus
from yeoul.types import Request, SamplingParams

SPECS = (FULL, window_spec(24))
LONGEST = 96


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.sequences = []
        self.now = 0.0

    @initialize(
        policies=st.builds(
            Policies,
            batching=st.sampled_from(BATCHINGS),
            order=st.sampled_from(SCHEDULING_POLICIES),
            victim=st.sampled_from(PREEMPTION_VICTIMS),
            fork=st.booleans(),
            ageing_seconds=st.sampled_from([0.0, 5.0, 1000.0]),
        ),
        allocation=st.sampled_from(KV_ALLOCATIONS),
        caching=st.booleans(),
        swap=st.sampled_from([0, 6, 100]),
        blocks=st.integers(7, 20),
        budget=st.sampled_from([1, 7, 40]),
        seqs=st.integers(1, 5),
    )
    def begin(self, policies, allocation, caching, swap, blocks, budget, seqs):
        sizes = (blocks, 20)
        kv = KVManager(SPECS, sizes, 16, prefix_caching=caching, allocation=allocation, max_model_len=LONGEST)
        self.kv = kv
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=LONGEST,
            policies=policies,
            swap_space=SwapSpace(swap, [1, 1]) if swap else None,
        )
        self.executor = ScriptedExecutor(SPECS, sizes, seqs)

    @rule(
        text=st.integers(0, 2),
        length=st.integers(1, 60),
        output=st.integers(1, 40),
        n=st.integers(1, 3),
        priority=st.integers(0, 2),
    )
    def add(self, text, length, output, n, priority):
        if len(self.sequences) > 40:
            return
        params = SamplingParams(max_tokens=output, n=n, ignore_eos=True)
        tokens = [(50 * text + i) % 250 for i in range(length)]
        request = Request(
            request_id=str(len(self.sequences)), prompt_token_ids=tokens, params=params, priority=priority
        )
        made = [Sequence(request, index, 1, len(self.sequences) + index, self.now) for index in range(n)]
        for sequence in made:
            sequence.siblings = made
            self.scheduler.add(sequence)
        self.sequences += made

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data):
        sequence = data.draw(st.sampled_from(self.sequences))
        was_over = sequence.status is SequenceStatus.FINISHED
        assert self.scheduler.abort(sequence) is not was_over

    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self.step()

    def step(self):
        self.now += 1.0
        if not self.scheduler.has_work:
            return
        plan = self.scheduler.schedule(self.now)
        assert plan.rows and plan.num_tokens <= self.scheduler.max_num_batched_tokens
        self.scheduler.check()
        self.scheduler.commit(plan, self.executor.collect(self.executor.submit(plan)))

    @precondition(lambda self: self.scheduler.has_work)
    @rule(data=st.data())
    def abort_in_flight(self, data):
        plan = self.scheduler.schedule(self.now)
        result = self.executor.collect(self.executor.submit(plan))
        self.scheduler.abort(data.draw(st.sampled_from(self.scheduler.scheduled)))
        self.scheduler.check()
        self.scheduler.commit(plan, result)

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def fail(self):
        """The executor never saw the plan. Who runs and was not part of it goes on."""
        self.scheduler.schedule(self.now)
        self.scheduler.fail_step()
        self.executor.in_doubt = True

    @invariant()
    def books(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            for usage, pool in zip(self.kv.usage(), self.kv.pools, strict=True):
                assert usage.used + usage.cached + usage.free == pool.capacity

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(4000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)
        assert [usage.used for usage in self.kv.usage()] == [0, 0] and self.scheduler.swap_used == 0


@pytest.mark.timeout(300)
def test_thousands_of_operations():
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=50, stateful_step_count=40, deadline=None)
    )
