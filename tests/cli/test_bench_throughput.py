"""yeoul bench throughput: figures that belong together, and every token counted."""

import json
import signal

import pytest
from cli_kit import inline, refuses, running

from yeoul.cli.session import open_engine
from yeoul.config import EngineConfig
from yeoul.engine.step_record import StepRecord
from yeoul.lab.throughput import Batch, measure
from yeoul.lab.workload import Lengths

FAST = ["--prompts", 3, "--input-tokens", "8-12", "--output-tokens", 4, "--repeats", 2, "--num-threads", 1]


def test_the_table_and_the_json_say_the_same(tiny_llama):
    done = inline("bench", "throughput", tiny_llama, *FAST, "--json")
    assert done.returncode == 0, done
    assert done.stderr.splitlines()[-1] == "bench throughput: 3 of 3 runs"
    *table, last = done.stdout.splitlines()
    report = json.loads(last)
    result = report["result"]
    assert report["benchmark"] == "throughput" and report["workload"]["input_tokens"] == {"low": 8, "high": 12}
    assert 24 <= result["prompt_tokens"] <= 36 and result["output_tokens"] == 12
    for name in ("prompt", "output"):
        rate = result[f"{name}_tokens_per_second"]
        assert rate["high"] == pytest.approx(result[f"{name}_tokens"] / result["seconds"]["low"])
        assert rate["low"] <= rate["median"] <= rate["high"]
    assert all(word in "\n".join(table) for word in ("prompt", "output", "total", "native"))


def test_all_prompts_run_at_once_and_the_warm_up_is_left_out(tiny_llama):
    """On a clock that jumps at every look, slowly in the first run."""

    class Clock:
        time, step = 0.0, 100.0

        def now(self):
            self.time += self.step
            return self.time

        def unix(self):
            return 0.0

    clock, seen = Clock(), []

    def show(done, total):
        seen.append((done, total))
        clock.step = 1.0

    batch = Batch(prompts=4, input_tokens=Lengths(3, 3), output_tokens=Lengths(2, 5), repeats=2)
    with open_engine(EngineConfig(model=str(tiny_llama), clock=clock)) as engine:
        result = measure(engine, batch, show, lambda: False)
        steps = [len(record.rows) for record in engine.step_log.records if isinstance(record, StepRecord)]
    assert seen == [(1, 3), (2, 3), (3, 3)] and result.prompt_tokens == 12
    assert max(steps) == 4
    assert result.seconds.high < 100 and result.seconds.low == result.seconds.high


def test_ctrl_c_ends_it_with_130(tiny_llama):
    with running("bench", "throughput", tiny_llama, "--executor", "reference", "--repeats", 900) as process:
        assert process.stderr.readline().startswith("bench throughput: ")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        assert (process.returncode, out) == (130, "")


def test_what_does_not_fit_is_one_line(tiny_llama):
    refuses(inline("bench", "throughput", tiny_llama, "--input-tokens", 5000), 1, "5000 tokens")
    refuses(inline("bench", "throughput", tiny_llama, "--output-tokens", "a"), 2, "'a' is no number of tokens")
