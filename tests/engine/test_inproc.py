"""InprocClient: concurrency, aborts of every kind, draining, closing, a dying engine, and the observer's times."""

import asyncio
import gc
import logging
import sys
import time

import pytest
from scripted_executor import executor_of, request, scripted_engine

from yeoul.engine.inproc import SWITCH_INTERVAL, InprocClient
from yeoul.errors import (
    CapacityError,
    ContextLengthError,
    EngineDeadError,
    EngineError,
    RequestError,
    ShuttingDownError,
)
from yeoul.types import FinishReason


class Observer:
    def __init__(self):
        self.gaps = []
        self.times = []

    def delivered(self, gap, num_tokens):
        self.gaps.append((gap, num_tokens))

    def finished(self, times):
        self.times.append(times)


def run(body, *, observer=None, slow=0.0, **options):
    """Give `body` a client with its own engine; close it and check that nothing is left."""

    async def main():
        engine = scripted_engine(**options)
        if slow:
            executor_of(engine).before = lambda plan: time.sleep(slow)
        client = InprocClient(engine, observer)
        try:
            return await body(client)
        finally:
            await client.close()
            assert executor_of(engine).closed
            assert engine.stats().kv_used_blocks == 0
            engine.check_books()

    before = sys.getswitchinterval()
    try:
        return asyncio.run(asyncio.wait_for(main(), 30))
    finally:
        sys.setswitchinterval(before)


async def collect(stream):
    return [output async for output in stream]


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come true")


def tokens_of(outputs, index=0):
    return [token for output in outputs if output.index == index for token in output.token_ids]


def test_32_concurrent_requests_get_what_each_gets_alone():
    requests = [request(f"r{i}", [i, i + 1, i + 2], max_tokens=20, n=1 + i % 2) for i in range(32)]

    async def together(client):
        return await asyncio.gather(*(collect(client.submit(made)) for made in requests))

    async def alone(client):
        return [await collect(client.submit(made)) for made in requests]

    got = run(together, num_blocks=(40,), max_num_seqs=8)
    expected = run(alone)
    for made, one, other in zip(requests, got, expected, strict=True):
        for index in range(made.params.n):
            assert tokens_of(one, index) == tokens_of(other, index)
            ends = [output.finish_reason for output in one if output.index == index and output.finish_reason]
            assert ends == [FinishReason.LENGTH]


def test_the_event_loop_is_woken_once_per_step():
    async def body(client):
        calls, loop = [], asyncio.get_running_loop()
        real = loop.call_soon_threadsafe

        def counted(callback, *args):
            calls.append(callback)
            return real(callback, *args)

        loop.call_soon_threadsafe = counted
        try:
            await asyncio.gather(*(collect(client.submit(request(f"r{i}", [i], max_tokens=30))) for i in range(8)))
        finally:
            del loop.call_soon_threadsafe
        return len(calls), client.stats().num_steps

    calls, steps = run(body)
    assert steps <= calls <= steps + 1


def test_aclose_aborts_and_later_requests_are_served():
    async def body(client):
        for round_ in range(20):
            stream = client.submit(request(f"r{round_}", [1] * 40, max_tokens=400))
            if round_ % 2:
                await anext(stream)
            await stream.aclose()
            await stream.aclose()
            await until(lambda: client.stats().kv_used_blocks == client.stats().num_waiting == 0)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert client.stats().finished["abort"] == 20
        return await collect(client.submit(request("last", [1], max_tokens=3)))

    assert len(tokens_of(run(body, max_num_seqs=1, slow=0.0005))) == 3


def test_a_dropped_iterator_aborts():
    async def body(client):
        stream = client.submit(request("a", [1], max_tokens=400))
        await anext(stream)
        del stream
        gc.collect()
        await until(lambda: client.stats().finished["abort"] == 1)

    run(body, slow=0.001)


def test_a_cancelled_reader_can_read_on():
    async def body(client):
        stream = client.submit(request("a", [1], max_tokens=50))
        first = await anext(stream)
        with pytest.raises(TimeoutError):
            while True:
                await asyncio.wait_for(anext(stream), 0.0001)
        rest = await collect(stream)
        return first, rest

    _, rest = run(body, slow=0.005)
    assert rest[-1].finish_reason is FinishReason.LENGTH and rest[-1].num_output_tokens == 50


def test_abort_by_id_delivers_the_terminal_output_to_the_reader():
    async def body(client):
        stream = client.submit(request("a", [1], max_tokens=400, n=2))
        await anext(stream)
        client.abort("a")
        client.abort("nobody")
        return await collect(stream)

    outputs = run(body, slow=0.001)
    assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.ABORT] * 2


def test_refusals_come_at_once():
    async def body(client):
        with pytest.raises(RequestError, match="empty"):
            client.submit(request("a", []))
        with pytest.raises(ContextLengthError):
            client.submit(request("a", [1] * 600))
        first = client.submit(request("a", [1], max_tokens=400))
        with pytest.raises(RequestError, match="in use"):
            client.check(request("a", [1]))
        client.submit(request("b", [1] * 50, max_tokens=1))
        with pytest.raises(CapacityError):
            client.submit(request("c", [1] * 60))
        await first.aclose()

    run(body, max_waiting_tokens=100, max_num_seqs=1, slow=0.001)


def test_drain_lets_running_requests_finish_and_refuses_new_ones():
    async def body(client):
        stream = client.submit(request("a", [1], max_tokens=30))
        draining = asyncio.create_task(client.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDownError) as refusal:
            client.submit(request("b", [1]))
        assert refusal.value.status == 503 and refusal.value.retry_after
        outputs = await collect(stream)
        assert await draining
        assert await client.drain(0)
        return outputs

    assert run(body, slow=0.001)[-1].finish_reason is FinishReason.LENGTH


def test_drain_aborts_what_is_left_after_its_time():
    async def body(client):
        stream = client.submit(request("a", [1], max_tokens=400))
        await anext(stream)
        assert not await client.drain(0.01)
        return await collect(stream)

    assert run(body, slow=0.005)[-1].finish_reason is FinishReason.ABORT


def test_close_aborts_what_runs_and_is_idempotent():
    async def body(client):
        stream = client.submit(request("a", [1], max_tokens=400))
        await anext(stream)
        await client.close()
        await client.close()
        assert not client.stats().alive
        with pytest.raises(ShuttingDownError):
            client.check(request("b", [1]))
        return await collect(stream)

    assert run(body, slow=0.001)[-1].finish_reason is FinishReason.ABORT


def test_a_failed_step_ends_its_requests_without_raising():
    async def body(client):
        def before(plan):
            if plan.step_id == 2:
                raise EngineError("scripted fault")

        executor_of(client._engine).before = before
        outputs = await collect(client.submit(request("a", [1], max_tokens=9)))
        again = await collect(client.submit(request("b", [1], max_tokens=9)))
        return outputs, again

    outputs, again = run(body)
    assert outputs[-1].finish_reason is FinishReason.ERROR and outputs[-1].error
    assert again[-1].finish_reason is FinishReason.LENGTH


def test_a_dead_engine_tells_everybody():
    async def main():
        engine = scripted_engine()
        client = InprocClient(engine)
        streams = [client.submit(request(f"r{i}", [i], max_tokens=400)) for i in range(3)]
        await anext(streams[0])

        def die(plan):
            engine._kv.pools[0].allocate(1)
            raise EngineError("scripted fault")

        executor_of(engine).before = die
        results = await asyncio.gather(*(collect(stream) for stream in streams), return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert not client.stats().alive
        with pytest.raises(EngineDeadError):
            client.submit(request("late", [1]))
        assert await client.drain(1)
        await client.close()
        assert executor_of(engine).closed

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_closed_event_loop_aborts_its_requests_and_the_next_loop_is_served(caplog):
    caplog.set_level(logging.WARNING)
    engine = scripted_engine()
    executor_of(engine).before = lambda plan: time.sleep(0.002)
    client = InprocClient(engine)
    kept = []

    async def leave():
        kept.append(client.submit(request("a", [1], max_tokens=400)))
        await anext(kept[0])

    async def come():
        outputs = await collect(client.submit(request("a", [1], max_tokens=3)))
        await client.close()
        return outputs

    asyncio.run(leave())
    deadline = time.monotonic() + 5
    while client.stats().num_running and time.monotonic() < deadline:
        time.sleep(0.001)
    assert client.stats().kv_used_blocks == 0
    assert len(tokens_of(asyncio.run(come()))) == 3


def test_an_idle_engine_waits_without_spinning_and_shows_that_it_lives():
    async def body(client):
        await collect(client.submit(request("a", [1], max_tokens=1)))
        started = time.thread_time(), time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - started[1] < 0.1
        stats = client.stats()
        assert stats.alive and stats.last_step_age < 2
        return sys.getswitchinterval()

    assert run(body) == pytest.approx(SWITCH_INTERVAL)


def test_the_observer_learns_gaps_and_times():
    observer = Observer()

    async def body(client):
        await collect(client.submit(request("a", [1] * 20, max_tokens=5, n=2)))

    run(body, observer=observer, slow=0.002)
    assert len(observer.gaps) == 10
    assert [gap for gap, _ in observer.gaps].count(None) == 2
    assert all(gap is None or gap > 0 for gap, _ in observer.gaps)
    (times,) = observer.times
    assert (times.num_prompt_tokens, times.num_output_tokens, times.n, times.max_tokens) == (20, 10, 2, 5)
    assert times.finish_reason == "length"
    assert times.queue + times.prefill == pytest.approx(times.ttft)
    assert times.ttft + times.decode == pytest.approx(times.e2e, abs=0.01)
    assert times.queue >= 0 and times.prefill > 0 and times.decode > 0


def test_times_of_a_request_that_never_started():
    observer = Observer()

    async def body(client):
        first = client.submit(request("a", [1], max_tokens=400))
        second = client.submit(request("b", [1], max_tokens=400))
        await anext(first)
        client.abort("b")
        await collect(second)
        await first.aclose()
        await until(lambda: client.stats().num_running == 0)

    run(body, observer=observer, max_num_seqs=1, slow=0.001)
    waited = observer.times[0]
    assert (waited.queue, waited.ttft, waited.prefill, waited.decode) == (None, None, None, None)
    assert waited.e2e > 0 and waited.finish_reason == "abort"
