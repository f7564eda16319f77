"""Scheduler: what a plan contains, in what order, and what commit, abort and faults do to it."""

import pytest

from yeoul.errors import ConfigError, ContextLengthError, EngineError
from yeoul.kv.manager import KVManager
from yeoul.sched.scheduler import Scheduler
from yeoul.sched.sequence import Sequence, SequenceStatus
from yeoul.step import RowResult, RowStatus, StepResult
from yeoul.types import FinishReason, KVKind, KVSpec, Request, SamplingParams

FULL = KVSpec(KVKind.FULL, 1, 8, 8)
END = 99


class Kit:
    """A scheduler and the ids of its sequences; `run` commits token 7 for every sampling row."""

    def __init__(self, *, blocks=65, seqs=4, budget=32, length=1024, specs=(FULL,)):
        self.kv = KVManager(specs, [blocks] * len(specs), 16)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=length,
            end_tokens=frozenset({END}),
        )
        self.count = 0

    def add(self, prompt, **params):
        params.setdefault("max_tokens", None)
        request = Request(
            request_id=f"r{self.count}", prompt_token_ids=list(range(prompt)), params=SamplingParams(**params)
        )
        sequence = Sequence(request, 0, 5, self.count, 0.0)
        self.count += 1
        self.scheduler.add(sequence)
        return sequence

    def plan(self):
        return self.scheduler.schedule(1.0)

    def commit(self, plan, token=7, status=RowStatus.OK):
        rows = tuple(RowResult((token,) if row.sample else (), status=status) for row in plan.rows)
        committed = self.scheduler.commit(plan, StepResult(plan.step_id, rows, 0.0, 0.0))
        self.scheduler.check()
        return committed

    def run(self, token=7):
        plan = self.plan()
        return plan, self.commit(plan, token)


def shape(plan):
    return [(row.slot, row.start, row.num_tokens, row.sample) for row in plan.rows]


def test_a_prompt_is_computed_in_chunks_and_then_decodes_from_the_slot():
    kit = Kit(budget=32)
    sequence = kit.add(70)
    first, committed = kit.run()
    assert shape(first) == [(0, 0, 32, False)] and committed == []
    assert first.rows[0].token_ids == tuple(range(32))
    assert first.rows[0].state is not None and first.rows[0].state.seed == 5
    assert first.rows[0].new_blocks == ((1, 2),)
    second, _ = kit.run()
    assert shape(second) == [(0, 32, 32, False)] and second.rows[0].state is None
    third, committed = kit.run()
    assert shape(third) == [(0, 64, 6, True)] and third.rows[0].token_ids == tuple(range(64, 70))
    assert [gained.token_ids for gained in committed] == [(7,)]
    fourth, _ = kit.run()
    assert shape(fourth) == [(0, 70, 1, True)]
    assert fourth.rows[0].token_ids == () and fourth.rows[0].new_blocks == ((),)
    assert sequence.num_computed_tokens == 71 and sequence.num_tokens == 72


def test_running_rows_come_first_and_prompts_fill_the_rest():
    kit = Kit(budget=16)
    kit.add(4), kit.add(4)
    kit.run()
    kit.add(40)
    plan, _ = kit.run()
    assert shape(plan) == [(0, 4, 1, True), (1, 4, 1, True), (2, 0, 14, False)]
    kit.add(40)
    plan, _ = kit.run()
    assert shape(plan) == [(0, 5, 1, True), (1, 5, 1, True), (2, 14, 14, False)]
    assert kit.scheduler.wait_reason == "tokens"
    plan, _ = kit.run()
    assert shape(plan) == [(0, 6, 1, True), (1, 6, 1, True), (2, 28, 12, True), (3, 0, 2, False)]


@pytest.mark.parametrize("specs", [(FULL,), (KVSpec(KVKind.WINDOW, 1, 8, 8, window=32),)])
@pytest.mark.parametrize("budget", [1, 4, 50])
def test_every_running_row_gets_a_token_in_every_step(specs, budget):
    kit = Kit(blocks=30 if specs[0].kind is KVKind.FULL else 5, budget=budget, seqs=8, specs=specs, length=256)
    for prompt in (30, 3, 60, 1, 100, 7, 40, 40):
        kit.add(prompt, max_tokens=prompt)
    while kit.scheduler.has_work:
        plan, _ = kit.run()
        assert plan.num_tokens <= budget
        assert all(row.num_tokens > 0 for row in plan.rows)
        assert set(kit.scheduler.running) <= set(kit.scheduler.scheduled)


def test_slots_limit_what_runs_and_are_reused_after_release():
    kit = Kit(seqs=2)
    for _ in range(3):
        kit.add(4, max_tokens=2)
    plan, _ = kit.run()
    assert [row.slot for row in plan.rows] == [0, 1] and kit.scheduler.wait_reason == "slots"
    kit.run()
    plan, _ = kit.run()
    assert plan.released_slots == (0, 1)
    assert plan.rows[0].state is not None and plan.rows[0].slot in (0, 1)
    kit.run()
    assert not kit.scheduler.has_work and kit.kv.usage()[0].used == 0


def test_the_latest_arrived_is_preempted_and_recomputes_prompt_and_output():
    kit = Kit(blocks=5, budget=64)
    old, new = kit.add(30), kit.add(30)
    kit.run(token=7)
    for token in (8, 9):
        kit.run(token)
    plan = kit.plan()  # Position 32: the old one needs a third block, the pool has none left.
    assert kit.scheduler.preempted[0].sequence is new and kit.scheduler.preempted[0].num_lost_tokens == 32
    assert shape(plan) == [(0, 32, 1, True)] and plan.released_slots == (1,)
    assert kit.scheduler.wait_reason == "preemption" and kit.scheduler.counters.preemptions == 1
    kit.commit(plan)
    assert list(kit.scheduler.waiting) == [new]
    kit.scheduler.finish(old, FinishReason.STOP)
    plan, committed = kit.run()
    row = plan.rows[0]
    assert (row.start, row.num_tokens, row.sample) == (0, 33, True)
    assert row.token_ids == (*range(30), 7, 8, 9) and row.state is not None
    assert len(row.new_blocks[0]) == 3
    assert committed[0].sequence is new
    assert kit.plan().rows[0].token_ids == ()


def test_a_resumed_last_chunk_of_one_token_is_sent_and_not_taken_from_the_slot():
    kit = Kit(blocks=5, budget=64)
    old, new = kit.add(30), kit.add(30)
    for _ in range(4):
        kit.run()
    assert new.status is SequenceStatus.WAITING
    kit.scheduler.abort(old)
    kit.scheduler._max_chunk = 32
    kit.run()
    plan, _ = kit.run()
    assert shape(plan)[0][1:] == (32, 1, True) and plan.rows[0].token_ids == (7,)


def test_preempted_sequences_go_to_the_front_in_order_of_arrival():
    kit = Kit(blocks=9, budget=128, seqs=8)
    sequences = [kit.add(32) for _ in range(4)]
    kit.run()
    kit.run()
    preempted = [lost.sequence for lost in kit.scheduler.preempted]
    late = kit.add(1)
    assert preempted == [sequences[3], sequences[2]]
    assert list(kit.scheduler.waiting) == [sequences[2], sequences[3], late]


def test_nobody_overtakes_and_all_finish_when_memory_is_short():
    kit = Kit(blocks=7, budget=16, seqs=8)
    sequences = [kit.add(10 + 5 * i, max_tokens=30) for i in range(8)]
    first_seen = []
    while kit.scheduler.has_work:
        before = kit.scheduler.counters.prompt_tokens
        kit.run()
        assert kit.scheduler.counters.prompt_tokens >= before
        first_seen += kit.scheduler.first_scheduled
    assert first_seen == sequences
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in sequences)
    assert kit.scheduler.counters.preemptions > 0
    assert kit.scheduler.counters.generation_tokens == 8 * 30
    assert kit.scheduler.counters.prompt_tokens == sum(sequence.num_prompt_tokens for sequence in sequences)
    assert kit.kv.usage()[0].used == 0


def test_admission_wants_room_for_the_whole_prompt():
    kit = Kit(blocks=7, budget=32)
    kit.add(30)
    kit.run()
    kit.add(90)
    plan, _ = kit.run()
    assert len(plan.rows) == 1 and kit.scheduler.wait_reason == "blocks"


def test_what_can_never_fit_is_refused_and_the_rest_ends_by_length():
    kit = Kit(blocks=5, length=256)
    assert kit.scheduler.max_model_len == 64
    with pytest.raises(ContextLengthError, match="has 100 tokens; at most 64 fit"):
        kit.add(100)
    with pytest.raises(ContextLengthError):
        kit.add(64)
    sequence = kit.add(40, max_tokens=60)
    for _ in range(100):
        if not kit.scheduler.has_work:
            break
        kit.run()
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.num_tokens == 64 and kit.scheduler.counters.preemptions == 0


def test_a_prompt_that_leaves_room_for_one_token_gets_one():
    kit = Kit(length=64)
    sequence = kit.add(63)
    kit.run()
    kit.run()
    assert sequence.num_output_tokens == 1 and sequence.finish_reason is FinishReason.LENGTH


def test_end_tokens_end_unless_ignored():
    kit = Kit()
    stops, goes_on = kit.add(3), kit.add(3, ignore_eos=True)
    _, committed = kit.run(token=END)
    assert committed[0].ended_by_token and committed[0].finish_reason is FinishReason.STOP
    assert committed[1].finish_reason is None and not committed[1].ended_by_token
    assert stops.num_output_tokens == 1
    assert kit.scheduler.running == [goes_on]


def test_an_end_token_at_the_limit_counts_as_stop():
    kit = Kit()
    kit.add(3, max_tokens=1)
    _, committed = kit.run(token=END)
    assert committed[0].finish_reason is FinishReason.STOP


def test_abort_in_flight_keeps_blocks_until_commit():
    kit = Kit()
    gone, stays = kit.add(20), kit.add(4)
    plan = kit.plan()
    assert kit.scheduler.abort(gone) and not kit.scheduler.abort(gone)
    assert kit.kv.usage()[0].used == 3
    kit.scheduler.check()
    committed = kit.commit(plan)
    assert [gained.sequence for gained in committed] == [stays]
    assert kit.kv.usage()[0].used == 1
    assert gone.num_output_tokens == 0 and gone.finish_reason is FinishReason.ABORT
    assert kit.plan().released_slots == (0,)


def test_abort_of_waiting_and_running_sequences_frees_at_once():
    kit = Kit(seqs=1)
    running, waiting = kit.add(20), kit.add(20)
    kit.run()
    assert kit.scheduler.abort(waiting)
    assert kit.scheduler.abort(running)
    kit.scheduler.check()
    assert kit.kv.usage()[0].used == 0 and not kit.scheduler.has_work
    assert kit.scheduler.num_waiting_tokens == 0


@pytest.mark.parametrize("status", [RowStatus.NAN, RowStatus.ERROR])
def test_a_bad_row_ends_its_sequence_only(status):
    kit = Kit()
    bad, good = kit.add(4), kit.add(4)
    plan = kit.plan()
    rows = (RowResult(status=status), RowResult((7,)))
    committed = kit.scheduler.commit(plan, StepResult(plan.step_id, rows, 0.0, 0.0))
    assert [(c.sequence, c.finish_reason) for c in committed] == [(bad, FinishReason.ERROR), (good, None)]
    assert committed[0].error
    kit.scheduler.check()


def test_a_row_that_should_have_sampled_and_did_not_is_an_error():
    kit = Kit()
    sequence = kit.add(4)
    plan = kit.plan()
    kit.scheduler.commit(plan, StepResult(plan.step_id, (RowResult(),), 0.0, 0.0))
    assert sequence.finish_reason is FinishReason.ERROR


def test_a_result_of_another_step_is_refused():
    kit = Kit()
    kit.add(4)
    plan = kit.plan()
    with pytest.raises(EngineError, match="does not fit the plan"):
        kit.scheduler.commit(plan, StepResult(plan.step_id + 1, (RowResult((7,)),), 0.0, 0.0))
    with pytest.raises(EngineError, match="in flight"):
        kit.plan()
    kit.commit(plan)
    with pytest.raises(EngineError, match="does not fit the plan"):
        kit.commit(plan)


def test_fail_step_ends_the_step_and_spares_the_queue():
    kit = Kit(seqs=2)
    sequences = [kit.add(20) for _ in range(3)]
    kit.plan()
    kit.scheduler.abort(sequences[0])
    touched = kit.scheduler.fail_step()
    assert touched == sequences[:2]
    assert sequences[0].finish_reason is FinishReason.ABORT and sequences[1].finish_reason is FinishReason.ERROR
    assert sequences[2].status is SequenceStatus.WAITING
    kit.scheduler.check()
    assert kit.kv.usage()[0].used == 0
    assert kit.run()[0].rows[0].num_tokens == 20


def test_fail_step_with_nothing_running_ends_the_head_of_the_queue():
    kit = Kit()
    head, second = kit.add(4), kit.add(4)
    assert kit.scheduler.fail_step() == [head]
    assert list(kit.scheduler.waiting) == [second]


def test_an_idle_plan_is_empty_and_keeps_released_slots():
    kit = Kit()
    kit.add(3, max_tokens=1)
    kit.run()
    plan = kit.plan()
    assert (plan.rows, plan.released_slots) == ((), ())
    kit.add(3)
    assert kit.plan().released_slots == (0,)


def test_window_groups_bound_the_chunk_and_too_small_ones_are_refused():
    window = KVSpec(KVKind.WINDOW, 1, 8, 8, window=32)
    kit = Kit(blocks=5, budget=64, specs=(window,))
    kit.add(200, max_tokens=5)
    while kit.scheduler.has_work:
        plan, _ = kit.run()
        assert plan.rows[0].num_tokens <= 18
    with pytest.raises(ConfigError, match="smaller than its window"):
        Kit(blocks=2, specs=(window,))


def test_sampling_state_is_normalized():
    kit = Kit()
    kit.add(3, top_k=-1, temperature=0, logprobs=2)
    state = kit.plan().rows[0].state
    assert (state.top_k, state.temperature, state.num_logprobs) == (0, 0.0, 2)
    request = Request(request_id="r", prompt_token_ids=[1], params=SamplingParams(seed=-1))
    state = Sequence(request, 3, -1, 0, 0.0).slot_state()
    assert (state.seed, state.sequence_index, state.num_logprobs) == (2**64 - 1, 3, -1)
