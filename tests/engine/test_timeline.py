"""Timeline: every moment is in one part; what others' prompts, queues and preemption cost is told apart."""

import pytest
from scripted_executor import executor_of, request, scripted_engine

from yeoul.engine.loop import Engine
from yeoul.engine.timeline import Timeline


class StepClock:
    """Stands still but for what `pass_time` adds."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def unix(self) -> float:
        return self.time


def timed_engine(seconds_per_token: float = 1.0, **options) -> tuple[Engine, StepClock]:
    """An engine whose steps take `seconds_per_token` for every token in them, and no time else."""
    engine = scripted_engine(**options)
    clock = engine.clock = StepClock()

    def spend(plan) -> None:
        clock.time += seconds_per_token * plan.num_tokens

    executor_of(engine).before = spend
    return engine, clock


def run(engine):
    """The times of every request, and when its last output came, by request id."""
    ends = {}
    while engine.has_work:
        for output in engine.step().outputs:
            if output.finish_reason is not None:
                ends[output.request_id] = (output.times, engine.clock.now())
    return ends


def test_alone_there_is_prefill_and_decode() -> None:
    engine, clock = timed_engine()
    engine.add(request("a", range(1, 11), max_tokens=5))
    clock.time += 3
    times, end = run(engine)["a"]
    assert (times.queue, times.prefill, times.decode) == (3, 10, 4)
    assert (times.stalled, times.preempted) == (0, 0) and times.total == end - 100
    assert times.tokens_per_second == pytest.approx(1.0)


def test_prompts_of_others_stall() -> None:
    engine, _ = timed_engine()
    engine.add(request("a", range(1, 11), max_tokens=9))
    engine.step()
    engine.step()
    engine.add(request("b", range(1, 21), max_tokens=2))
    ends = run(engine)
    a, end = ends["a"]
    assert (a.queue, a.prefill, a.stalled) == (0, 10, 20), "b's twenty tokens ran in one step with one of a's"
    assert a.total == end - 100 and a.decode == 9, "one second for each own token, one for b's second token"
    b, _ = ends["b"]
    assert (b.queue, b.prefill, b.stalled) == (0, 21, 0)


def test_a_queue_for_slots_and_chunks_of_a_prompt() -> None:
    engine, _ = timed_engine(max_num_seqs=1, max_num_batched_tokens=4)
    engine.add(request("a", range(1, 11), max_tokens=2))
    engine.add(request("b", range(1, 6), max_tokens=1))
    ends = run(engine)
    assert (ends["a"][0].prefill, ends["a"][0].decode) == (10, 1)
    b = ends["b"][0]
    assert (b.queue, b.prefill, b.decode, b.tokens_per_second) == (11, 5, 0, None)
    assert b.total == ends["b"][1] - 100


def test_preemption_is_the_wait_and_what_is_computed_again() -> None:
    engine, _ = timed_engine(num_blocks=(6,), max_model_len=80, prefix_caching=False)
    for name in ("a", "b"):
        engine.add(request(name, range(1, 30), max_tokens=40))
    ends = run(engine)
    assert engine.stats().preemptions > 0
    a, b = ends["a"][0], ends["b"][0]
    assert a.preempted == 0 and b.preempted > 29
    for times, end in ends.values():
        assert times.total == pytest.approx(end - 100)


def test_parts_sum_to_the_whole_in_random_traffic() -> None:
    engine, clock = timed_engine(0.25, num_blocks=(24,), max_num_seqs=4, max_num_batched_tokens=16)
    arrived, ends = {}, {}
    for number in range(40):
        arrived[f"r{number}"] = clock.now()
        engine.add(request(f"r{number}", range(1, 2 + number * 7 % 90), max_tokens=1 + number * 5 % 40))
        clock.time += number % 3
        for output in engine.step().outputs:
            if output.finish_reason is not None:
                ends[output.request_id] = (output.times, clock.now())
    ends |= run(engine)
    assert set(ends) == set(arrived)
    for name, (times, end) in ends.items():
        parts = (times.queue, times.prefill, times.decode, times.stalled, times.preempted)
        assert min(parts) >= 0 and sum(parts) == pytest.approx(times.total)
        assert times.total == pytest.approx(end - arrived[name]), name


def test_an_aborted_sequence_has_no_times() -> None:
    engine, _ = timed_engine()
    engine.add(request("a", [1, 2], max_tokens=50))
    engine.step()
    engine.abort("a")
    assert run(engine)["a"][0] is None


def test_a_timeline_that_never_started() -> None:
    assert Timeline(5.0).times(0).total == 0
