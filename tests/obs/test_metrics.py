"""Metric names, types, buckets and what feeds them, read back with prometheus-client's own parser."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from yeoul.engine.client import EngineStats, RequestTimes
from yeoul.engine.step_sizes import StepSizes
from yeoul.obs.metrics import Histogram, Metrics

TIMES = {
    "num_prompt_tokens": 30,
    "num_output_tokens": 11,
    "finish_reason": "stop",
    "queue": 0.5,
    "ttft": 0.7,
    "prefill": 0.2,
    "decode": 1.0,
    "e2e": 1.75,
    "max_tokens": 16,
    "n": 1,
    "max_output_tokens": 11,
}


def samples(metrics):
    """{(sample name, labels): value} of what /metrics answers."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics, name, **labels):
    return samples(metrics)[name, frozenset({"model_name": "m", **labels}.items())]


def test_gauges_and_counters_are_read_at_scrape_time():
    metrics = Metrics("m")
    stats = EngineStats(
        num_running=2, num_waiting=3, kv_used_blocks=5, kv_total_blocks=20, prompt_tokens=100, generation_tokens=50,
        preemptions=4, finished={"stop": 7, "abort": 1},
    )  # fmt: skip
    metrics.watch(lambda: stats)
    assert value(metrics, "yeoul:num_requests_running") == 2
    assert value(metrics, "yeoul:num_requests_waiting") == 3
    assert value(metrics, "yeoul:kv_cache_usage_perc") == 0.25
    assert value(metrics, "yeoul:prompt_tokens_total") == 100
    assert value(metrics, "yeoul:generation_tokens_total") == 50
    assert value(metrics, "yeoul:num_preemptions_total") == 4
    by_reason = {
        r: value(metrics, "yeoul:request_success_total", finished_reason=r) for r in ("stop", "length", "abort")
    }
    assert by_reason == {"stop": 7, "length": 0, "abort": 1}
    stats = EngineStats(num_running=9)
    assert value(metrics, "yeoul:num_requests_running") == 9 and value(metrics, "yeoul:kv_cache_usage_perc") == 0


def test_a_finished_request_feeds_every_request_histogram_once():
    metrics = Metrics("m")
    metrics.finished(RequestTimes(**TIMES))
    expected = {
        "time_to_first_token_seconds": 0.7,
        "e2e_request_latency_seconds": 1.75,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.2,
        "request_decode_time_seconds": 1.0,
        "request_inference_time_seconds": 1.2,
        "request_time_per_output_token_seconds": 0.1,
        "request_prompt_tokens": 30,
        "request_generation_tokens": 11,
        "request_params_max_tokens": 16,
        "request_params_n": 1,
        "request_max_num_generation_tokens": 11,
    }
    for name, total in expected.items():
        assert value(metrics, f"yeoul:{name}_count") == 1, name
        assert value(metrics, f"yeoul:{name}_sum") == pytest.approx(total), name


def test_events_that_never_came_are_not_counted_as_zero():
    metrics = Metrics("m")
    never = {"queue": None, "ttft": None, "prefill": None, "decode": None, "max_tokens": None, "num_output_tokens": 0}
    metrics.finished(RequestTimes(**{**TIMES, **never}))
    metrics.finished(RequestTimes(**{**TIMES, "num_output_tokens": 1, "decode": 0.0}))
    assert value(metrics, "yeoul:time_to_first_token_seconds_count") == 1
    assert value(metrics, "yeoul:request_inference_time_seconds_count") == 1
    assert value(metrics, "yeoul:request_time_per_output_token_seconds_count") == 0, "undefined for one token"
    assert value(metrics, "yeoul:request_params_max_tokens_count") == 1
    assert value(metrics, "yeoul:e2e_request_latency_seconds_count") == 2


def test_gaps_between_deliveries():
    metrics = Metrics("m")
    for gap, num_tokens in ((None, 1), (0.04, 4), (0.1, 0), (0.02, 1)):
        metrics.delivered(gap, num_tokens)
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert value(metrics, f"yeoul:{name}_count") == 2
        assert value(metrics, f"yeoul:{name}_sum") == pytest.approx(0.06)
    assert value(metrics, "yeoul:inter_token_latency_seconds_bucket", le="0.025") == 1


def test_buckets_are_cumulative_with_inclusive_bounds():
    histogram = Histogram((1.0, 2.0))
    for one in (0.5, 1.0, 1.5, 2.0, 3.0, None):
        histogram.observe(one)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 4.0), ("+Inf", 5.0)] and histogram.total == 8.0


def test_token_buckets_end_at_the_context():
    bounds = {
        dict(labels)["le"]
        for name, labels in samples(Metrics("m", max_model_len=100))
        if name == "yeoul:request_prompt_tokens_bucket"
    }
    assert bounds == {"1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"}


def test_prefix_is_a_choice():
    metrics = Metrics("m", prefix="vllm")
    metrics.watch(EngineStats)
    names = {name for name, _ in samples(metrics)}
    assert "vllm:num_requests_running" in names and not any(name.startswith("yeoul") for name in names)


def test_sizes_of_steps():
    sizes = StepSizes()
    for size in (1, 1, 8, 9, 20000):
        sizes.count(size)
    counts, total = sizes.snapshot()
    metrics = Metrics("m")
    metrics.watch(lambda: EngineStats(step_sizes=counts, step_tokens=total))
    name = "yeoul:iteration_tokens_total"
    assert value(metrics, f"{name}_count") == 5 and value(metrics, f"{name}_sum") == 20019
    buckets = {bound: value(metrics, f"{name}_bucket", le=bound) for bound in ("1.0", "8.0", "16.0", "16384.0", "+Inf")}
    assert list(buckets.values()) == [2, 3, 4, 4, 5]
    metrics.watch(EngineStats)
    assert value(metrics, f"{name}_count") == 0


NAMES = {
    "e2e_request_latency_seconds": "histogram",
    "generation_tokens": "counter",
    "inter_token_latency_seconds": "histogram",
    "iteration_tokens_total": "histogram",
    "kv_cache_usage_perc": "gauge",
    "num_preemptions": "counter",
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "prefix_cache_hits": "counter",
    "prefix_cache_queries": "counter",
    "prompt_tokens": "counter",
    "request_decode_time_seconds": "histogram",
    "request_generation_tokens": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_params_max_tokens": "histogram",
    "request_params_n": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_success": "counter",
    "request_time_per_output_token_seconds": "histogram",
    "time_per_output_token_seconds": "histogram",
    "time_to_first_token_seconds": "histogram",
}
"""vLLM's names and types, which dashboards know. A counter's series have `_total` at their end."""
OWN_NAMES = {
    "kv_computed_slots": "gauge",
    "kv_over_reserved_slots": "gauge",
    "kv_partial_slots": "gauge",
    "kv_reserved_slots": "gauge",
    "preemption_lost_tokens": "counter",
    "preemption_swapped_tokens": "counter",
}
"""What vLLM has no metric for."""


def watched():
    metrics = Metrics("m")
    metrics.watch(EngineStats)
    return metrics


def test_the_names_and_types():
    families = text_string_to_metric_families(watched().render().decode())
    own = {family.name.removeprefix("yeoul:"): family.type for family in families if family.name.startswith("yeoul:")}
    assert own == NAMES | OWN_NAMES


def test_promtool_finds_nothing_but_what_the_names_force():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run([promtool, "check", "metrics"], input=watched().render(), capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode().splitlines()
    assert said and done.returncode in (0, 3)
    forced = (
        r"yeoul:\w+ metric names should not contain ':'",
        r'yeoul:iteration_tokens_total non-counter metrics should not have "_total" suffix',
    )
    assert [line for line in said if not any(re.fullmatch(one, line) for one in forced)] == []
