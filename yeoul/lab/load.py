"""When requests are sent: open-loop (at their times, whatever the server does) or closed-loop (users who wait).

Owns tasks and pacing; must not know HTTP (`client`) or what times mean (`meter`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from yeoul.lab.client import Target, exchange, tls_context
from yeoul.lab.meter import Record
from yeoul.lab.workload import Item

T = TypeVar("T")
Send = Callable[[Item, float], Awaitable[Record]]
Progress = Callable[[int, int], None]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the client itself took: it shares the processors with a server on the same machine."""

    cpu_seconds: float
    wall_seconds: float
    deliveries: int
    microseconds_per_delivery: float | None


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run on the fastest event loop there is."""
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def measure(
    target: Target, items: Sequence[Item], arrivals: Sequence[float] | None, users: int, progress: Progress
) -> tuple[list[Record], Cost]:
    """Send all items: at `arrivals` (seconds from now), or without them, as `users` that each send when answered."""
    done, context = 0, tls_context(target)

    async def send(item: Item, due: float) -> Record:
        nonlocal done
        record = await exchange(target, item, due, context)
        done += 1
        progress(done, len(items))
        return record

    wall, cpu = time.perf_counter(), time.process_time()
    records = await (closed_loop(send, items, users) if arrivals is None else open_loop(send, items, arrivals))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    deliveries = sum(len(record.deliveries) for record in records)
    each = cpu / deliveries * 1e6 if deliveries else None
    return records, Cost(cpu_seconds=cpu, wall_seconds=wall, deliveries=deliveries, microseconds_per_delivery=each)


async def open_loop(send: Send, items: Sequence[Item], arrivals: Sequence[float]) -> list[Record]:
    """Every item at its time; records in the order of the items."""
    start = time.perf_counter()

    async def one(item: Item, due: float) -> Record:
        await asyncio.sleep(due - time.perf_counter())
        return await send(item, due)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(item, start + at)) for item, at in zip(items, arrivals, strict=True)]
    return [task.result() for task in tasks]


async def closed_loop(send: Send, items: Sequence[Item], users: int) -> list[Record]:
    """Each user takes the next item when its last one is answered; records in the order of their ends."""
    waiting = iter(items)
    records: list[Record] = []

    async def user() -> None:
        for item in waiting:
            records.append(await send(item, time.perf_counter()))

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())
    return records
