"""yeoul bench latency: figures that belong together, and the engine's own arithmetic behind them."""

import json
import signal

import pytest
from cli_kit import inline, refuses, running

from yeoul.cli.latency import Workload, measure
from yeoul.cli.session import open_engine
from yeoul.cli.terminal import Interrupt
from yeoul.config import EngineConfig
from yeoul.lab.meter import Spread
from yeoul.ops.cost import Cost

FAST = ["--prompt-tokens", 32, "--decode-tokens", 5, "--repeats", 2]


def test_the_table_and_the_json_say_the_same(tiny_llama):
    done = inline("bench", "latency", tiny_llama, *FAST, "--batch", "1,3", "--num-threads", 1, "--json")
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "bench latency: 9 of 9 runs"
    *table, last = done.stdout.splitlines()
    report = json.loads(last)
    assert report["benchmark"] == "latency" and report["threads"] == 1 and report["executor"].startswith("native")
    assert report["machine"]["cpus"] >= 1 and report["config"]["max_num_seqs"] == 64
    prompt, (one, three) = report["prompt"], report["decode"]
    assert prompt["tokens"] == 32 and prompt["tokens_per_second"]["high"] == pytest.approx(32 / prompt["ttft"]["low"])
    assert (one["batch"], three["batch"]) == (1, 3)
    for row in (one, three):
        assert row["tokens_per_second"]["high"] == pytest.approx(row["batch"] / row["step"]["low"])
        per_step = (row["weight_bytes_per_token"] + row["kv_bytes_per_token"]) * row["batch"]
        assert row["gigabytes_per_second"]["high"] == pytest.approx(per_step / row["step"]["low"] / 1e9, rel=1e-3)
    # A step of three rows reads the weights once, but for the rows of the embedding.
    assert one["weight_bytes_per_token"] > 2.5 * three["weight_bytes_per_token"]
    assert tiny_llama.stat().st_size > one["weight_bytes_per_token"] > 0.5 * tiny_llama.stat().st_size
    text = "\n".join(table)
    assert all(words in text for words in ("prompt 32, TTFT", "decode 1, step", "decode 3, step", "GB/s"))


def test_medians_leave_the_warm_up_out(tiny_llama):
    """On a clock that jumps at every look, slowly at first: only later runs may count."""

    class Clock:
        time, looks = 0.0, 0

        def now(self):
            self.looks += 1
            self.time += 100.0 if self.looks < 12 else 1.0
            return self.time

        def unix(self):
            return 0.0

    workload = Workload(prompt_tokens=4, context_tokens=2, decode_tokens=4, batches=(2,), repeats=3)
    seen = []
    with open_engine(EngineConfig(model=str(tiny_llama), clock=Clock())) as engine:
        prompt, (decode,) = measure(
            engine,
            workload,
            lambda rows, context: Cost(weight_bytes=8 * rows, kv_read_bytes=context),
            lambda *at: seen.append(at),
            Interrupt(),
        )
    assert seen == [(done, 8) for done in range(1, 9)]
    assert prompt.ttft.high < 100 and prompt.tokens_per_second.median == pytest.approx(4 / prompt.ttft.median)
    assert decode.step == Spread(median=decode.step.median, low=decode.step.median, high=decode.step.median)
    assert (decode.weight_bytes_per_token, decode.kv_bytes_per_token) == (8, 2)


def test_ctrl_c_ends_it_with_130(tiny_llama):
    with running("bench", "latency", tiny_llama, "--executor", "reference", "--repeats", 900) as process:
        assert process.stderr.readline().startswith("bench latency: ")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        assert (process.returncode, out) == (130, "")


def test_what_does_not_fit_is_one_line(tiny_llama):
    done = inline("bench", "latency", tiny_llama, "--prompt-tokens", 5000)
    refuses(done, 1, "5000 tokens")
