"""API keys: which paths are open, what counts as a key, and that keys are never shown; CORS; certificates."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import subprocess

import httpx
import pytest
from server_kit import Kit, error_of, running

from yeoul.errors import ConfigError
from yeoul.server.auth import digest
from yeoul.server.listen import bind
from yeoul.server.options import ServerOptions

KEYS = {"api_key": (digest("sk-one"), digest("sk-two"))}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_every_route_but_health_and_ready_wants_a_key():
    kit = Kit(**KEYS)
    paths = {route.path for route in kit.app.routes} | {"/nowhere", "/health/", "//health"}
    assert {"/v1/models", "/metrics", "/docs", "/openapi.json", "/version"} <= paths
    for path in paths - {"/health", "/ready"}:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PROPFIND"):
            response = kit.request(method, path)
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer" and response.headers["x-request-id"]
    assert kit.get("/health").status_code == kit.get("/ready").status_code == 200
    assert error_of(kit.get("/v1/models"), 401)["code"] == "invalid_api_key"


def test_x3_keys_do_not_share_the_prefix_cache():
    kit = Kit(**KEYS)
    for key, salt in (("sk-one", None), ("sk-one", None), ("sk-two", None), ("sk-one", "s"), ("sk-two", "s")):
        body = {"prompt": "hello", "max_tokens": 1} | ({"cache_salt": salt} if salt else {})
        assert kit.request("POST", "/v1/completions", json=body, headers=bearer(key)).status_code == 200
    first, again, *others = [request.cache_salt for request in kit.client.requests]
    assert first == again and len({first, *others}) == 4 and "sk-one" not in first
    open_kit = Kit()
    assert open_kit.complete(prompt="hello", max_tokens=1).status_code == 200
    assert open_kit.client.requests[0].cache_salt is None


def raw_status(kit, raw_path, path):
    """The status for a path that a client wrote in another way than the routes see it."""
    sent = []
    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": raw_path, "query_string": b"", "headers": [],
        "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "", "http_version": "1.1",
    }  # fmt: skip

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(kit.app(scope, receive, send))
    return sent[0]["status"]


def test_the_raw_path_decides():
    kit = Kit(**KEYS)
    assert raw_status(kit, b"/health", "/health") == 200
    assert raw_status(kit, b"/%68ealth", "/health") == 401
    assert raw_status(kit, b"/v1/../health", "/health") == raw_status(kit, b"/v1/models", "/health") == 401


@pytest.mark.parametrize("key", ["sk-one", "sk-two"])
def test_each_key_opens(key):
    kit = Kit(**KEYS)
    for headers in (bearer(key), {"Authorization": f"bearer {key}"}):
        assert kit.get("/v1/models", headers=headers).status_code == 200
    assert kit.get("/nowhere", headers=bearer(key)).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("sk-on"),
        bearer("sk-one2"),
        bearer("SK-ONE"),
        bearer("sk-one,sk-two"),
        {"Authorization": "sk-one"},
        {"Authorization": "Basic sk-one"},
        {"X-Api-Key": "sk-one"},
        [("Authorization", "Bearer sk-one"), ("Authorization", "Bearer sk-one")],
        {"Authorization": b"Bearer \xff\xfe"},
    ],
    ids=str,
)
def test_what_is_not_a_key(headers):
    kit = Kit(**KEYS)
    assert error_of(kit.get("/v1/models", headers=headers), 401)["type"] == "invalid_request_error"
    assert kit.client.requests == []


def test_without_keys_nothing_is_asked():
    kit = Kit()
    assert kit.get("/v1/models").status_code == 200
    assert kit.get("/v1/models", headers=bearer("any")).status_code == 200


def test_a_key_makes_insecure_unnecessary_and_is_not_kept():
    options = ServerOptions(host="0.0.0.0", **KEYS)
    assert options.host == "0.0.0.0" and "sk-one" not in repr(options)
    with pytest.raises(ConfigError, match="digests"):
        ServerOptions(api_key=(b"sk-one",))


def test_keys_are_not_logged(caplog):
    caplog.set_level(logging.DEBUG)
    kit = Kit(access_log=True, **KEYS)
    with running(kit) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        for key in ("sk-one", "sk-wrong"):
            httpx.post(url, json={"prompt": "x"}, headers=bearer(key))
    said = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith(("yeoul", "uvicorn")))
    assert "POST /v1/completions" in said and "sk-" not in said


PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip


def test_cors_is_off_by_default():
    kit = Kit()
    assert "access-control-allow-origin" not in kit.get("/v1/models", headers={"Origin": "https://a.example"}).headers
    assert kit.request("OPTIONS", "/v1/models", headers=PREFLIGHT).status_code == 405


def test_cors_for_the_origins_that_were_given():
    kit = Kit(cors_origin=("https://a.example",), **KEYS)
    preflight = kit.request("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == "https://a.example"
    refused = kit.get("/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://a.example"
    other = kit.request("OPTIONS", "/v1/models", headers=PREFLIGHT | {"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["", "a.example", "https://a.example/", "https://a.example/path", "null"])
def test_what_is_not_an_origin(origin):
    with pytest.raises(ConfigError, match="origin") as caught:
        ServerOptions(cors_origin=(origin,))
    assert caught.value.param == "cors_origin"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=localhost", "-addext",
               "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]  # fmt: skip
    subprocess.run([*command, "-nodes"], cwd=folder, check=True, capture_output=True)
    locked = ["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", "key.pem", "-out", "locked.pem"]
    subprocess.run(locked, cwd=folder, check=True, capture_output=True)
    return folder


def test_https(certificate):
    files = {"ssl_certfile": str(certificate / "cert.pem"), "ssl_keyfile": str(certificate / "key.pem")}
    with running(Kit(**files)) as port:
        trust = ssl.create_default_context(cafile=files["ssl_certfile"])
        url = f"https://127.0.0.1:{port}/v1/completions"
        assert httpx.post(url, json={"prompt": "ab"}, verify=trust).json()["choices"][0]["text"] == "AB0"
        with httpx.stream("POST", url, json={"prompt": "ab", "stream": True}, verify=trust) as response:
            assert response.read().endswith(b"[DONE]\n\n")


@pytest.mark.parametrize(
    ("cert", "key"), [("missing.pem", None), ("key.pem", "key.pem"), ("cert.pem", None), ("cert.pem", "locked.pem")]
)
def test_certificates_that_cannot_be_used_are_one_line(certificate, cert, key):
    options = ServerOptions(
        port=0, ssl_certfile=str(certificate / cert), ssl_keyfile=None if key is None else str(certificate / key)
    )
    with pytest.raises(ConfigError, match="certificate") as caught:
        bind(options)
    assert "--ssl-keyfile" in caught.value.hint and "\n" not in str(caught.value)


def test_a_private_key_alone_is_refused():
    with pytest.raises(ConfigError) as caught:
        ServerOptions(ssl_keyfile="key.pem")
    assert caught.value.param == "ssl_keyfile"
