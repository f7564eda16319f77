"""Binding, options, and the server as a process of its own: exit codes, the second signal, what it imports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from server_kit import http_post, send_raw

from yeoul.errors import ConfigError
from yeoul.server.listen import address, bind
from yeoul.server.options import ServerOptions

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from server_kit import Kit
from yeoul.server.listen import bind
from yeoul.server.run import run
kit = Kit(shutdown_timeout=20)
kit.client.step_delay = 0.05
code = run(bind(kit.options), kit.client, kit.text, kit.options, on_ready=lambda url: print(url, flush=True))
assert kit.client.closed
print("closed", flush=True)
sys.exit(code)
"""


@pytest.fixture
def server():
    """(process, port) of a server whose replies take 50 ms a byte."""
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    url = process.stdout.readline().strip()
    yield process, int(url.rsplit(":", 1)[1])
    process.stdout.close()
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a3_the_first_signal_drains_and_exits_with_0(server, number):
    process, port = server
    connection = send_raw(port, http_post("/v1/completions", {"prompt": "abcdefgh", "stream": True}))
    first = connection.recv(9000)
    idle = send_raw(port, b"")
    process.send_signal(number)
    time.sleep(0.1)
    assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "x"}).status_code == 503
    while part := connection.recv(9000):
        first += part
    assert b"[DONE]" in first
    assert process.wait(5) == 0 and process.stdout.read() == "closed\n"
    idle.close()
    connection.close()
    with pytest.raises(ConnectionRefusedError):
        send_raw(port, b"")


def test_a3_the_second_signal_ends_the_process_at_once(server):
    process, port = server
    connection = send_raw(
        port, http_post("/v1/completions", {"prompt": "a" * 2000, "max_tokens": 2000, "stream": True})
    )
    connection.recv(9000)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(2) == 128 + signal.SIGTERM and time.monotonic() - started < 2
    connection.close()


def test_a_port_in_use_is_one_line_with_a_hint():
    with bind(ServerOptions(port=0)) as first:
        port = first.getsockname()[1]
        assert address(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"port {port} .* in use") as caught:
            bind(ServerOptions(port=port))
    assert "--port" in caught.value.hint and "\n" not in str(caught.value)


def test_a_host_that_does_not_exist_is_one_line_with_a_hint():
    with pytest.raises(ConfigError, match="cannot listen") as caught:
        bind(ServerOptions(host="203.0.113.1", port=0, insecure=True))
    assert caught.value.hint


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_switch(host):
    assert ServerOptions(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_other_addresses_need_insecure(host):
    with pytest.raises(ConfigError, match="other machines") as caught:
        ServerOptions(host=host)
    assert "--insecure" in caught.value.hint
    assert ServerOptions(host=host, insecure=True).insecure


@pytest.mark.parametrize(
    "option",
    [{"port": -1}, {"port": 65536}, {"port": True}, {"header_timeout": 0}, {"body_timeout": float("nan")},
     {"max_body_bytes": 0}, {"metrics_prefix": "a b"}, {"served_model_names": ("",)}, {"max_prompts": 0}],
    ids=str,
)  # fmt: skip
def test_options_out_of_range_are_named(option):
    with pytest.raises(ConfigError) as caught:
        ServerOptions(**option)
    assert caught.value.param == next(iter(option))


def test_accepted_connections_have_a_small_send_buffer():
    with bind(ServerOptions(port=0)) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 128 << 10


def test_the_server_imports_no_numpy_torch_or_tokenizer():
    code = (
        "import sys, yeoul.server.run, yeoul.obs.logs\n"
        "print([n for n in ('numpy', 'torch', 'tokenizers', 'jinja2', 'rich', 'typer', 'httpx') if n in sys.modules])\n"
        "print([n for n in sys.modules if n.startswith(('yeoul.exec', 'yeoul.sched', 'yeoul.kv', 'yeoul.text'))])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert result.stdout.splitlines() == ["[]", "[]"]


def test_binding_imports_no_framework():
    code = "import sys, yeoul.server.listen; print('fastapi' in sys.modules or 'uvicorn' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
