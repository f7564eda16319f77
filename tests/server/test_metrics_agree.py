"""What a client measures and what /metrics says: counters equal usage (M3), TTFT and TPOT agree loosely."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_kit import engine_server

COUNT = 12
TOKENS = 24


@pytest.fixture(scope="module")
def url(tiny_llama):
    with engine_server(str(tiny_llama), max_num_seqs=4, max_model_len=256) as url:
        yield url


def scrape(url):
    text = httpx.get(url + "/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    reasons = {s.labels["finished_reason"]: s.value for s in samples if "finished_reason" in s.labels}
    return {s.name.removeprefix("yeoul:"): s.value for s in samples if set(s.labels) == {"model_name"}} | reasons


def timed_stream(url, prompt):
    """(time to first token, mean time per later token, usage) as a client sees them."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "seed": 1,
            "stream_options": {"include_usage": True}}  # fmt: skip
    started, arrivals, usage = time.perf_counter(), [], None
    with httpx.stream("POST", url + "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.perf_counter())
                usage = json.loads(line[6:])["usage"] or usage
    return arrivals[0] - started, (arrivals[-2] - arrivals[0]) / (TOKENS - 1), usage


def test_m3_counters_and_times_agree_with_what_clients_see(url):
    httpx.post(url + "/v1/completions", json={"prompt": "warm", "max_tokens": 2})
    before = scrape(url)
    seen = [timed_stream(url, "the quick brown fox " * (1 + number % 5)) for number in range(COUNT)]
    after = scrape(url)
    grown = {name: after[name] - before[name] for name in before}
    assert min(grown[name] for name in grown if name.endswith(("_total", "_count", "_sum"))) >= 0
    usages = [usage for _, _, usage in seen]
    assert grown["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert grown["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages) == COUNT * TOKENS
    assert grown["length"] == grown["time_to_first_token_seconds_count"] == COUNT
    computed = grown["prompt_tokens_total"] - grown["prefix_cache_hits_total"]
    assert grown["iteration_tokens_total_sum"] == computed + COUNT * (TOKENS - 1)
    for name, place in (("time_to_first_token_seconds", 0), ("request_time_per_output_token_seconds", 1)):
        server = grown[f"{name}_sum"] / grown[f"{name}_count"]
        client = sum(one[place] for one in seen) / COUNT
        assert 0 < server < client + 0.05, "the server's part is within the client's"
        assert client < server + 1.0, "and is most of it, even on a busy machine"


def test_m1_prompt_tokens_do_not_shrink_when_repeated(url):
    body = {"prompt": "the same " * 20, "max_tokens": 1}
    bodies = [httpx.post(url + "/v1/completions", json=body).json() for _ in "ab"]
    assert bodies[0]["usage"]["prompt_tokens"] == bodies[1]["usage"]["prompt_tokens"] > 16
