"""From a committed step to its line in the step log. Owns which numbers go into it; must not know how it is written."""

from __future__ import annotations

from itertools import islice

from yeoul.engine.clock import Stopwatch
from yeoul.engine.step_log import MAX_NAMED_WAITING, StepRecord
from yeoul.kv.manager import KVManager
from yeoul.sched.scheduler import Scheduler
from yeoul.step import StepPlan, StepResult


def step_record(
    scheduler: Scheduler, kv: KVManager, plan: StepPlan, result: StepResult, watch: Stopwatch
) -> StepRecord:
    """The log's line of a step that was just committed."""
    drain, schedule, execute, commit, emit = watch.laps
    return StepRecord(
        step=plan.step_id,
        at=watch.started_at,
        drain=drain,
        schedule=schedule,
        execute=execute,
        commit=commit,
        emit=emit,
        started_at=result.started_at,
        finished_at=result.finished_at,
        rows=[
            (
                sequence.request.request_id,
                sequence.index,
                row.start,
                row.num_tokens,
                row.start + row.num_tokens,
                len(row_result.token_ids),
            )
            for sequence, row, row_result in zip(scheduler.scheduled, plan.rows, result.rows, strict=True)
        ],
        preempted=[
            (
                lost.sequence.request.request_id,
                lost.sequence.index,
                lost.num_lost_tokens,
                lost.num_swapped_tokens,
                lost.needed_by.request.request_id,
                lost.needed_by.index,
            )
            for lost in scheduler.preempted
        ],
        blocks=[(group.used, group.cached, group.free) for group in kv.usage()],
        num_waiting=len(scheduler.waiting),
        waiting=[sequence.request.request_id for sequence in islice(scheduler.waiting, MAX_NAMED_WAITING)],
        wait_reason=scheduler.wait_reason,
    )
