"""The short form of docs' promises against hostile clients, with a real engine on a tiny model: statuses, counts and
conservation. Times and memory over hours are for a soak."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from server_kit import engine_parts, http_post

NUM_MALFORMED = 2000
PARALLEL = 32
PLAIN = {"prompt": "the quick brown fox", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def served(tiny_llama):
    with engine_parts(str(tiny_llama), max_num_seqs=4, max_model_len=512) as (url, parts):
        yield url, parts


def port_of(url):
    return int(url.rsplit(":", 1)[1])


def plain_text(url):
    response = httpx.post(url + "/v1/completions", json=PLAIN, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def wait_until_idle(parts, seconds=1.0):
    """Nothing runs, waits or holds a block, within the time that is promised (and some more on a busy machine)."""
    deadline = time.monotonic() + 10 * seconds
    while time.monotonic() < deadline:
        stats = parts.client.stats()
        if not (stats.num_running or stats.num_waiting or stats.kv_used_blocks):
            parts.client._engine.check_books()
            return
        time.sleep(0.02)
    raise AssertionError(f"still busy: {parts.client.stats()}")


def malformed(chance):
    """(path, body) of a request that has exactly one thing wrong."""
    path = chance.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"])
    good = {"/v1/completions": PLAIN, "/v1/chat/completions": CHAT, "/v1/responses": {"input": "x"},
            "/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}[path]  # fmt: skip
    text = json.dumps(good)
    name = chance.choice(sorted(good))
    wrong = chance.choice([True, -1.5, [], [[]], {}, {"a": {}}, [None], [{}], [-1], [2**63], "\x00" * 70_000])
    kinds = [
        lambda: text[: chance.randrange(1, len(text))],
        lambda: text.encode()[:9] + bytes(chance.randrange(128, 256) for _ in range(4)) + text.encode()[9:],
        lambda: "[" * 10_000 + "]" * 10_000,
        lambda: '{"a":' * 5_000 + "1" + "}" * 5_000,
        lambda: text[:-1] + f', "{name}": {json.dumps(good[name])}}}',
        lambda: text[:-1] + f', "x{chance.randrange(999)}": 1}}',
        lambda: text[:-1] + ', "temperature2": NaN}',
        lambda: text[:-1] + ', "top_p": 1e999}',
        lambda: text[:-1] + ', "seed": ' + "9" * 5_000 + "}",
        lambda: text[:-1] + ', "user": "\\ud800"}',
        lambda: json.dumps({**good, "model": wrong}),
        lambda: json.dumps({**good, "model": "other-" + str(chance.random())}),
        lambda: json.dumps([good]),
        lambda: json.dumps({"temperature": 0, "z": 1}),
        lambda: "",
        lambda: "null",
    ]
    body = chance.choice(kinds)()
    return path, body if isinstance(body, bytes) else body.encode()


def send_malformed(port, seed, count):
    """The statuses of some malformed requests over kept connections."""
    chance = random.Random(seed)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    statuses = []
    for _ in range(count):
        path, body = malformed(chance)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert set(answer) == {"error"}, answer
        assert "\n" not in answer["error"]["message"] and len(answer["error"]["message"]) < 500
        statuses.append((response.status, path, body[:80]))
    connection.close()
    return statuses


def test_malformed_requests_are_refused_and_disturb_nobody(served):
    url, parts = served
    before = plain_text(url)
    with ThreadPoolExecutor(PARALLEL) as pool:
        sent = [pool.submit(send_malformed, port_of(url), seed, NUM_MALFORMED // PARALLEL) for seed in range(PARALLEL)]
        between = [plain_text(url) for _ in range(5)]
        statuses = [status for future in sent for status in future.result()]
    assert [status for status in statuses if status[0] not in (400, 404)] == []
    assert len(statuses) >= NUM_MALFORMED // PARALLEL * PARALLEL
    assert [*between, plain_text(url)] == [before] * 6
    wait_until_idle(parts)


BORDERS = {
    "max_tokens": (1, 2**31 - 1),
    "temperature": (0, 1_000_000),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, 8),
    "logprobs": (0, 20),
}
INTEGERS = {"max_tokens", "top_k", "seed", "n", "logprobs"}


@pytest.mark.parametrize("name", BORDERS)
def test_numbers_at_their_borders_leave_the_neighbour_alone(served, name):
    url, parts = served
    low, high = BORDERS[name]
    expected = plain_text(url)
    cases = {low - 1: 400, low: 200, high: 200, high + 1: 400, 2**31: None, 2**63: None}
    for value, status in cases.items():
        status = status or (200 if low <= value <= high else 400)
        body = {**PLAIN, name: value}
        if name == "max_tokens" and value > 100:
            body["prompt"] = [1] * 500
        assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == status, value
    for value, status in ((-0.0, 400 if name in INTEGERS else 200), (None, 200), (True, 400), ("1", 400)):
        assert httpx.post(url + "/v1/completions", json={**PLAIN, name: value}).status_code == status, value
    assert plain_text(url) == expected
    wait_until_idle(parts)


@pytest.mark.parametrize("ids", [[-1], [2**31], [2**63], [10**30], [1.0], [True], [None]], ids=str)
def test_v1_ids_out_of_range_are_refused(served, ids):
    url, parts = served
    vocab_size = parts.client.info.vocab_size
    assert httpx.post(url + "/v1/completions", json={**PLAIN, "prompt": [vocab_size - 1]}).status_code == 200
    for prompt in (ids, [vocab_size], [[1], ids]):
        assert httpx.post(url + "/v1/completions", json={**PLAIN, "prompt": prompt}).status_code == 400


def open_files():
    return len(os.listdir("/proc/self/fd"))


def leave(port, *, mid_stream, reset):
    """Ask for a long reply and go away: after the first event or before it, with FIN or with RST."""
    body = {**PLAIN, "prompt": "the river " * 8, "max_tokens": 400, "stream": True}
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(http_post("/v1/completions", body))
        if mid_stream:
            assert b"200 OK" in connection.recv(4096)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@pytest.mark.parametrize("mid_stream", [True, False], ids=["mid-stream", "before the first token"])
def test_a1_a_hundred_clients_that_leave(served, mid_stream):
    url, parts = served
    expected = plain_text(url)
    wait_until_idle(parts)
    files = open_files()
    with ThreadPoolExecutor(8) as pool:
        gone = [
            pool.submit(leave, port_of(url), mid_stream=mid_stream, reset=bool(number % 2)) for number in range(100)
        ]
        others = [plain_text(url) for _ in range(5)]
        for future in gone:
            future.result()
    wait_until_idle(parts)
    assert [*others, plain_text(url)] == [expected] * 6
    deadline = time.monotonic() + 5
    while open_files() > files + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert open_files() <= files + 2


def test_clients_that_read_slowly_or_never_hold_nobody_up(served):
    url, _ = served
    expected = plain_text(url)
    body = {**PLAIN, "max_tokens": 300, "stream": True}
    slow = [socket.create_connection(("127.0.0.1", port_of(url)), timeout=30) for _ in range(16)]
    for number, connection in enumerate(slow):
        data = http_post("/v1/completions", body)
        connection.sendall(data if number % 2 else data[: len(data) // 2])
    assert [plain_text(url) for _ in range(5)] == [expected] * 5
    for connection in slow:
        connection.close()


@contextmanager
def broken(owner, name, *, when=lambda *args: True, times=1):
    """A method that raises, so many times, where its arguments are such; the real one otherwise."""
    real = getattr(owner, name)
    left = [times]

    def method(*args, **kwargs):
        if left[0] and when(*args):
            left[0] -= 1
            raise RuntimeError("injected")
        return real(*args, **kwargs)

    setattr(owner, name, method)
    try:
        yield left
    finally:
        delattr(owner, name)


def test_a_fault_in_one_requests_output_ends_that_request_alone(served, monkeypatch):
    """Detokenizer: the engine makes the text state of each sequence; the second one that is made breaks."""
    url, parts = served
    engine = parts.client._engine
    expected = plain_text(url)

    class BreakingText:
        stopped = False

        def push(self, token_ids):
            raise RuntimeError("injected")

        def finish(self):
            return ""

    real = engine._make_text
    monkeypatch.setattr(engine, "_make_text", lambda p: BreakingText() if p.stop == ("break",) else real(p))
    with ThreadPoolExecutor(2) as pool:
        neighbour = pool.submit(plain_text, url)
        response = httpx.post(url + "/v1/completions", json={**PLAIN, "stop": ["break"]})
        assert neighbour.result() == expected
    assert response.status_code == 500 and "injected" not in response.text
    assert plain_text(url) == expected
    wait_until_idle(parts)


def test_a_fault_in_the_template_ends_that_request_alone(served, monkeypatch):
    url, parts = served
    encoder = parts.text._chat
    real = encoder._template.render

    def render(messages, **options):
        if messages[0]["content"] == "meet the fault":
            raise RuntimeError("injected")
        return real(messages, **options)

    monkeypatch.setattr(encoder._template, "render", render)
    bad = {**CHAT, "messages": [{"role": "user", "content": "meet the fault"}]}
    response = httpx.post(url + "/v1/chat/completions", json=bad)
    assert response.status_code == 500 and "injected" not in response.text
    assert httpx.post(url + "/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.parametrize(
    ("place", "name"),
    [("_scheduler", "schedule"), ("_scheduler", "commit"), ("_kv", "grow"), ("_executor", "submit"),
     ("_executor", "collect")],
)  # fmt: skip
def test_a_fault_in_a_step_ends_its_requests_and_the_engine_goes_on(served, place, name):
    url, parts = served
    engine = parts.client._engine
    expected = plain_text(url)
    wait_until_idle(parts)
    owner = getattr(engine, place)
    with broken(owner, name) as left:
        response = httpx.post(url + "/v1/completions", json=PLAIN, timeout=30)
        assert left == [0] and response.status_code == 500, response.text
        assert response.json()["error"]["code"] == "engine_error" and "injected" not in response.text
        streamed = httpx.post(url + "/v1/completions", json={**PLAIN, "stream": True}, timeout=30)
        assert streamed.text.endswith("[DONE]\n\n")
    engine.check_books()
    assert plain_text(url) == expected and httpx.get(url + "/health").status_code == 200
    wait_until_idle(parts)


def test_a_fault_in_mid_stream_is_an_event_and_no_done(served):
    url, parts = served
    executor = parts.client._engine._executor
    steps = []

    def third(plan):
        steps.append(plan)
        return len(steps) == 4

    with broken(executor, "submit", when=third):
        response = httpx.post(url + "/v1/completions", json={**PLAIN, "stream": True}, timeout=30)
    assert response.status_code == 200 and "[DONE]" not in response.text
    last = json.loads(response.text.rstrip().rsplit("\n\n", 1)[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_error"
    wait_until_idle(parts)


def test_client_made_names_add_no_series_to_the_metrics(served):
    url, _ = served

    def num_series():
        return len(httpx.get(url + "/metrics").text.splitlines())

    before = num_series()
    with httpx.Client(base_url=url) as http:
        for number in range(50):
            assert http.post("/v1/completions", json={**PLAIN, "model": f"m{number}"}).status_code == 404
            assert http.request(f"METHOD{number}", f"/path{number}").status_code in (400, 404, 405)
    assert num_series() == before
