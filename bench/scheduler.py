"""What planning costs: microseconds of schedule + commit per step, without a model: `python bench/scheduler.py`.

The steps are decodes of running sequences, with and without a queue behind them, and prefills with the prefix cache on
and off (hashing, looking up and publishing, at 0 % hits).
"""

import argparse
import time
from pathlib import Path

from report import finish, show, summary

from yeoul.kv.manager import KVManager
from yeoul.sched.policies import Policies
from yeoul.sched.scheduler import Scheduler
from yeoul.sched.sequence import Sequence
from yeoul.step import RowResult, StepResult
from yeoul.types import KVKind, KVSpec, Request, SamplingParams

BLOCK = 16
LONGEST = 8192
SPECS = (KVSpec(KVKind.FULL, 1, 64, 64), KVSpec(KVKind.WINDOW, 1, 64, 64, window=512))


def scheduler_of(caching: bool, order: str = "fcfs", budget: int = 512, blocks: int = 20000) -> Scheduler:
    kv = KVManager(SPECS, [blocks, 20000], BLOCK, prefix_caching=caching, max_model_len=LONGEST)
    policies = Policies(order=order)
    return Scheduler(kv, max_num_seqs=65, max_num_batched_tokens=budget, max_model_len=LONGEST, policies=policies)


def add(scheduler: Scheduler, number: int, prompt: int) -> None:
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    ids = [(number * 7919 + i) % 50000 for i in range(prompt)]
    request = Request(request_id=f"r{number}", prompt_token_ids=ids, params=params, priority=number % 5)
    scheduler.add(Sequence(request, 0, 1, number, 0.0))


def step(scheduler: Scheduler) -> float:
    """Microseconds of one schedule and commit."""
    started = time.perf_counter()
    plan = scheduler.schedule(1.0)
    planned = time.perf_counter()
    rows = tuple([RowResult((7,) if row.sample else ()) for row in plan.rows])
    result = StepResult(plan.step_id, rows, 0.0, 0.0)
    begun = time.perf_counter()
    scheduler.commit(plan, result)
    return 1e6 * (planned - started + time.perf_counter() - begun)


def decodes(running: int, waiting: int, steps: int, order: str = "fcfs") -> dict[str, dict[str, float]]:
    """With a slot free for the queue's first and too few blocks: the whole queue is looked at in every step."""
    blocks = 64 * (2 + steps // BLOCK) + 1
    scheduler = scheduler_of(True, order, blocks=blocks)
    for number in range(running):
        add(scheduler, number, 8)
    step(scheduler)
    for number in range(running, running + waiting):
        add(scheduler, number, (blocks - 32) * BLOCK)
    for _ in range(4):
        step(scheduler)
    samples = [step(scheduler) for _ in range(steps)]
    if waiting and scheduler.wait_reason != "blocks":
        raise RuntimeError("the queue was not held back by blocks")
    return {"us per step": summary(samples)}


def prefills(caching: bool, prompts: int) -> dict[str, dict[str, float]]:
    """A prompt of 512 tokens in every step; per prompt token."""
    scheduler, samples = scheduler_of(caching, budget=576), []
    for number in range(prompts):
        add(scheduler, number, 512)
        samples.append(step(scheduler) / 512)
        for sequence in list(scheduler.running):
            scheduler.abort(sequence)
    return {"us per prompt token": summary(samples)}


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {
        "1 row": decodes(1, 0, options.steps),
        "64 rows": decodes(64, 0, options.steps),
        "64 rows, 1,000 waiting": decodes(64, 1000, min(options.steps, 60)),
    }
    for order in ("priority", "longest_prefix"):
        rows[f"64 rows, 1,000 waiting, {order}"] = decodes(64, 1000, min(options.steps, 60), order)
    caching = {f"prefix cache {'on' if on else 'off'}": prefills(on, options.steps // 10) for on in (True, False)}
    show("Scheduler", rows)
    show("Prefill", caching)
    finish({"scheduler": rows, "prefill": caching}, vars(options), options.json)


if __name__ == "__main__":
    main()
