"""The server on a real socket: clients that leave, limits below ASGI, the openai client, draining."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from contextlib import closing

import httpx
import openai
import pytest
from server_kit import Kit, Step, http_post, running, send_raw

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes close() send RST instead of FIN."""


def wait_until(condition, timeout=5.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


def read_all(connection):
    data = b""
    with closing(connection):
        while part := connection.recv(65536):
            data += part
    return data


def plain_answer(port):
    response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "ab"})
    return response.status_code, response.json()["choices"]


@pytest.fixture(scope="module")
def port():
    """One server with the default limits, for tests that leave no trace in it."""
    with running(Kit()) as port:
        yield port


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("hold_at", [0, 2], ids=["before the first token", "in the middle"])
def test_a1_a_client_that_leaves_aborts_its_request(stream, hold_at):
    kit = Kit()
    kit.client.hold_at = hold_at
    body = {"prompt": ["abcdef", "ghi"], "n": 2, "stream": stream}
    with running(kit) as port:
        for round_number in range(1, 9):
            connection = send_raw(port, http_post("/v1/completions", body))
            wait_until(lambda: len(kit.client.active) == 2)
            if stream and hold_at:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            if round_number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()
            wait_until(lambda count=round_number: len(kit.client.aborted) == 2 * count, 1.0)
            assert not kit.client.active
        kit.client.released = True
        assert plain_answer(port)[0] == 200


def test_a_client_that_leaves_during_its_body_is_no_request():
    kit = Kit()
    with running(kit) as port:
        send_raw(port, http_post("/v1/completions", {"prompt": "abc"})[:-5]).close()
        assert plain_answer(port)[0] == 200
    assert len(kit.client.requests) == 1


def test_openai_client():
    kit = Kit(served_model_names=("toy", "alias"))
    with running(kit) as port, openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as api:
        assert [model.id for model in api.models.list()] == ["toy", "alias"]
        assert api.models.retrieve("alias").id == "alias"
        messages = [{"role": "user", "content": "hi"}]
        chat = api.chat.completions.create(model="toy", messages=messages, logprobs=True, top_logprobs=2, n=2)
        assert chat.choices[1].message.content == "USER:HI|ASSISTANT:1"
        assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
        options = {"include_usage": True}
        chunks = list(api.chat.completions.create(model="toy", messages=messages, stream=True, stream_options=options))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "USER:HI|ASSISTANT:0"
        assert chunks[-1].usage == chat.usage.model_copy(update={"completion_tokens": 20, "total_tokens": 38})
        completion = api.completions.create(model="alias", prompt=["ab", "cd"], logprobs=1)
        assert [choice.text for choice in completion.choices] == ["AB0", "CD0"]
        assert completion.choices[0].logprobs.text_offset == [0, 1, 2, 3]
        with pytest.raises(openai.NotFoundError, match="not served"):
            api.completions.create(model="gpt", prompt="a")
        with pytest.raises(openai.BadRequestError) as caught:
            api.completions.create(model="toy", prompt="a", presence_penalty=3)
        assert caught.value.param == "presence_penalty" and caught.value.response.headers["x-request-id"]


def test_keep_alive_serves_one_request_after_another():
    kit = Kit()
    with running(kit) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for _ in range(3):
            assert http.post("/v1/completions", json={"prompt": "ab"}).status_code == 200
            assert http.get("/v1/models").status_code == 200
        assert len(kit.server.server_state.connections) == 1


def status_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    if body:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    return int(head.split()[1])


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(101)) + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\na: " + b"x" * 17000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\na: " + b"x" * 17000, 431),
        (b"GET /" + b"x" * 17000, 431),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n", 400),
    ],
    ids=["text", "tls", "header", "101 fields", "long field", "endless field", "endless url", "two lengths", "minus"],
)
def test_bad_heads_are_refused_in_openais_shape(port, data, status):
    answer = read_all(send_raw(port, data))
    assert status_of(answer) == status and b"connection: close" in answer
    assert plain_answer(port)[0] == 200


def test_limits_of_the_head_are_inclusive(port):
    fields = b"".join(b"h%d: x\r\n" % i for i in range(98)) + b"connection: close\r\nhost: test\r\n"
    for extra in (fields, b"connection: close\r\na: " + b"x" * 16000 + b"\r\n"):
        answer = read_all(send_raw(port, b"GET /health HTTP/1.1\r\n" + extra + b"\r\n"))
        assert answer.startswith(b"HTTP/1.1 200")


def test_slow_heads_are_closed():
    kit = Kit(header_timeout=0.2)
    with running(kit) as port:
        slow = [send_raw(port, sent) for sent in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\na: b\r\n")]
        assert [status_of(read_all(connection)) for connection in slow] == [408, 408, 408]
        assert plain_answer(port)[0] == 200
        connection = send_raw(port, b"GET /health HTTP/1.1\r\n\r\n")
        assert connection.recv(9000).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\nGET /he")
        assert status_of(read_all(connection)) == 408


def test_slow_bodies_are_closed_however_they_drip():
    kit = Kit(body_timeout=0.3)
    with running(kit) as port:
        connection = send_raw(port, http_post("/v1/completions", {"prompt": "a" * 500})[:150])
        dripping = threading.Thread(target=drip, args=(connection,))
        dripping.start()
        assert status_of(read_all(connection)) == 408
        dripping.join()
        assert plain_answer(port)[0] == 200
    assert len(kit.client.requests) == 1


def drip(connection):
    try:
        for _ in range(40):
            connection.sendall(b"a")
            time.sleep(0.02)
    except OSError:
        pass  # the server closed, which is what the test waits for


def test_a_body_over_the_limit_is_answered_and_the_connection_survives_if_the_rest_comes():
    kit = Kit(max_body_bytes=100, body_timeout=0.5)
    with running(kit) as port:
        connection = send_raw(port, http_post("/v1/completions", {"prompt": "a" * 100_000}))
        assert connection.recv(9000).startswith(b"HTTP/1.1 413")
        connection.sendall(http_post("/v1/completions", {"prompt": "a"}))
        assert connection.recv(9000).startswith(b"HTTP/1.1 200")
        connection.close()
        stalled = send_raw(port, http_post("/v1/completions", {"prompt": "a" * 100_000})[:1000])
        assert b"HTTP/1.1 413" in read_all(stalled)


def test_idle_connections_are_closed_even_if_they_send_blank_lines():
    kit = Kit(keep_alive_timeout=0.2, header_timeout=0.2)
    with running(kit) as port:
        connection = send_raw(port, b"GET /health HTTP/1.1\r\n\r\n")
        assert connection.recv(9000).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        read_all(connection)


def test_pipelined_requests_close_the_connection_and_do_not_hide_a_disconnect():
    kit = Kit()
    kit.client.hold_at = 1
    post = http_post("/v1/completions", {"prompt": "ab"})
    with running(kit) as port:
        connection = send_raw(port, post + post)
        wait_until(lambda: kit.client.active)
        connection.close()
        wait_until(lambda: kit.client.aborted, 1.0)
        kit.client.released = True
        answer = read_all(send_raw(port, post + post))
        assert answer.count(b"HTTP/1.1 200") == 1
    assert len(kit.client.requests) == 2


def test_garbage_after_a_request_does_not_corrupt_its_stream():
    kit = Kit()
    kit.client.step_delay = 0.02
    with running(kit) as port:
        connection = send_raw(port, http_post("/v1/completions", {"prompt": "abcdef", "stream": True}))
        first = connection.recv(9000)
        connection.sendall(b"\x00\x01garbage\r\n\r\n")
        answer = first + read_all(connection)
        assert answer.count(b"HTTP/1.1") == 1 and b"data: [DONE]" in answer


def test_a_reader_that_stopped_reading_is_closed_and_its_request_aborted():
    kit = Kit(lambda request, index: [Step("x" * 4000, (1,)) for _ in range(5000)], write_timeout=0.3)
    with running(kit) as port:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(http_post("/v1/completions", {"prompt": "ab", "stream": True}))
        wait_until(lambda: kit.client.aborted, 5.0)
        assert b"[DONE]" not in read_all(connection)


def test_a_slow_reader_is_served():
    kit = Kit(lambda request, index: [Step("x" * 4000, (1,)) for _ in range(40)], write_timeout=0.2)
    with running(kit) as port:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        post = http_post("/v1/completions", {"prompt": "ab", "stream": True})
        connection.sendall(post.replace(b"\r\nhost", b"\r\nconnection: close\r\nhost", 1))
        data = b""
        while part := connection.recv(4096):
            data += part
            time.sleep(0.01)
        connection.close()
        assert b"[DONE]" in data and not kit.client.aborted


def test_head_has_no_body(port):
    answer = read_all(send_raw(port, b"HEAD /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n")


def test_a3_draining_finishes_streams_and_refuses_new_work():
    kit = Kit(shutdown_timeout=10)
    kit.client.hold_at = 2
    with running(kit) as port:
        connection = send_raw(port, http_post("/v1/completions", {"prompt": "abcd", "stream": True}))
        first = connection.recv(9000)
        kit.server.stop()
        wait_until(lambda: kit.client.draining)
        refused = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["code"] == "shutting_down"
        kit.client.released = True
        assert b"data: [DONE]" in first + read_all(connection)
    assert kit.client.drain_result is True


def test_a3_what_does_not_finish_in_time_ends_with_an_error():
    kit = Kit(shutdown_timeout=0.1)
    kit.client.hold_at = 2
    with running(kit) as port:
        connection = send_raw(port, http_post("/v1/completions", {"prompt": "abcd", "stream": True}))
        whole = send_raw(port, http_post("/v1/completions", {"prompt": "abcd"}))
        first = connection.recv(9000)
        wait_until(lambda: len(kit.client.active) == 2)
        kit.server.stop()
        answer = first + read_all(connection)
        assert b'"code":"shutting_down"' in answer and b"[DONE]" not in answer
        assert read_all(whole).startswith(b"HTTP/1.1 503")
    assert kit.client.drain_result is False


def test_many_disconnects_leave_nothing_behind():
    kit = Kit()
    kit.client.hold_at = 1

    async def visit(port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_post("/v1/completions", {"prompt": "abc", "stream": True}))
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.transport.abort()

    async def visit_all(port):
        await asyncio.gather(*(visit(port) for _ in range(100)))

    with running(kit) as port:
        asyncio.run(visit_all(port))
        wait_until(lambda: not kit.server.server_state.connections and not kit.server.server_state.tasks)
        assert not kit.client.active
        kit.client.released = True
        assert plain_answer(port)[0] == 200
