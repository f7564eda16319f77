"""The timings object: where it stands, that it is only there on request, and that a real engine's parts sum up."""

from __future__ import annotations

import json

import httpx
import pytest
from server_kit import engine_server, events

BODY = {"prompt": "the quick brown fox", "max_tokens": 6, "ignore_eos": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "ignore_eos": True, "temperature": 0}
ON = {"X-Yeoul-Timings": "1"}
PARTS = ("queue", "prefill", "decode", "stalled", "preempted")


@pytest.fixture(scope="module")
def url(tiny_llama):
    with engine_server(str(tiny_llama), max_num_seqs=4, max_model_len=256) as url:
        yield url


def check(timings):
    assert set(timings) == {*PARTS, "total", "cached_tokens", "tokens_per_second"}
    assert min(timings[part] for part in PARTS) >= 0
    assert sum(timings[part] for part in PARTS) == pytest.approx(timings["total"], abs=1e-5)
    assert timings["prefill"] > 0 and timings["decode"] > 0 and timings["tokens_per_second"] > 0


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_on_request_only(url, path, body):
    assert "timings" not in httpx.post(url + path, json=body).json()
    assert "timings" not in httpx.post(url + path, json=body, headers={"X-Yeoul-Timings": "0"}).json()
    check(httpx.post(url + path, json=body, headers=ON).json()["timings"])


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_with_the_last_chunk_of_a_stream(url, options):
    body = {**CHAT, "stream": True, "stream_options": options}
    plain = events(httpx.post(url + "/v1/chat/completions", json=body))
    timed = events(httpx.post(url + "/v1/chat/completions", json=body, headers=ON))
    assert timed[-1] == "[DONE]" and not any("timings" in chunk for chunk in plain[:-1])
    check(timed[-2]["timings"])
    assert timed[-2]["choices"] == [] and ("usage" in timed[-2]) == bool(options)


def test_of_a_response(url):
    body = {"input": "hello", "max_output_tokens": 6, "ignore_eos": True}
    check(httpx.post(url + "/v1/responses", json=body, headers=ON).json()["timings"])
    last = httpx.post(url + "/v1/responses", json={**body, "stream": True}, headers=ON).text.split("\n\n")[-2]
    check(json.loads(last.split("data: ", 1)[1])["response"]["timings"])
