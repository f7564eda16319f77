"""Routes other than generation: models, health, errors of routing, request ids, documentation, the body's limits."""

from __future__ import annotations

import json

import msgspec
import pytest
from server_kit import Kit, error_of

from yeoul.engine.client import EngineStats, RequestTimes
from yeoul.obs.metrics import Metrics
from yeoul.server.app import create_app


@pytest.fixture
def kit():
    return Kit()


def test_models_and_their_names():
    kit = Kit(served_model_names=("one", "org/two"))
    data = kit.get("/v1/models").json()
    assert data["object"] == "list" and [model["id"] for model in data["data"]] == ["one", "org/two"]
    assert data["data"][0]["object"] == "model" and data["data"][0]["max_model_len"] == 4096
    assert kit.get("/v1/models/org/two").json()["id"] == "org/two"
    assert kit.complete(prompt="a", model="org/two").json()["model"] == "org/two"
    assert kit.complete(prompt="a").json()["model"] == "one"
    for response in (kit.get("/v1/models/toy"), kit.complete(prompt="a", model="toy"), kit.chat(model="toy")):
        error = error_of(response, 404)
        assert error["code"] == "model_not_found" and "toy" in error["message"] and "org/two" in error["message"]


def test_health_tells_the_truth(kit):
    assert kit.get("/health").status_code == 200 and kit.get("/ready").status_code == 200
    for stats in (EngineStats(alive=False), EngineStats(last_step_age=60.0)):
        kit.client.engine_stats = stats
        assert error_of(kit.get("/health"), 503)["code"] == "engine_dead"
        assert error_of(kit.get("/ready"), 503)["code"] == "engine_dead"
    kit.client.engine_stats = EngineStats(last_step_age=5.0)
    assert kit.get("/health").status_code == 200


def test_draining_refuses_new_work_but_stays_healthy(kit):
    kit.app.state.handlers.draining = True
    for response in (kit.complete(prompt="a"), kit.chat(), kit.get("/ready")):
        assert error_of(response, 503)["code"] == "shutting_down" and response.headers["retry-after"] == "5"
    assert kit.get("/health").status_code == 200
    assert kit.client.requests == []


def test_version(kit):
    assert set(kit.get("/version").json()) == {"version"}


def test_routing_errors_have_openais_shape(kit):
    assert error_of(kit.get("/nowhere"), 404)["code"] == "not_found"
    assert error_of(kit.get("/v1/models/"), 404)
    for method, path in (
        ("GET", "/v1/completions"),
        ("DELETE", "/health"),
        ("POST", "/v1/models"),
        ("BREW", "/health"),
    ):
        response = kit.request(method, path)
        assert error_of(response, 405)["code"] == "method_not_allowed" and response.headers["allow"]


def test_head_answers_like_get(kit):
    for path in ("/health", "/v1/models", "/metrics", "/docs"):
        assert kit.request("HEAD", path).status_code == 200
    assert kit.request("HEAD", "/nowhere").status_code == 404
    assert kit.request("HEAD", "/v1/completions").status_code == 405


@pytest.mark.parametrize("given", ["abc", "A.b_c-9" + "x" * 57])
def test_request_id_is_echoed(kit, given):
    for path in ("/health", "/nowhere"):
        assert kit.get(path, headers={"x-request-id": given}).headers["x-request-id"] == given
    response = kit.request("POST", "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": given})
    assert given in response.json()["id"]


@pytest.mark.parametrize("given", ["", "x" * 65, "a b", "a/b", "é", "<script>"])
def test_a_malformed_request_id_is_replaced(kit, given):
    answered = kit.get("/health", headers={"x-request-id": given.encode()}).headers["x-request-id"]
    assert answered != given and len(answered) == 32


def test_equal_request_ids_make_distinct_requests(kit):
    headers = {"x-request-id": "same"}
    ids = {kit.request("POST", "/v1/completions", json={"prompt": "a"}, headers=headers).json()["id"] for _ in range(3)}
    assert len(ids) == 3 and len({request.request_id for request in kit.client.requests}) == 3


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_other_content_types_are_refused(kit, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    response = kit.request("POST", "/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    error = error_of(response, 415)
    assert "Content-Type: application/json" in error["message"]


def test_content_type_parameters_and_case_do_not_matter(kit):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert kit.request("POST", "/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_body_limit():
    kit = Kit(max_body_bytes=100)
    assert kit.raw(b'{"prompt": "a"}'.ljust(100)).status_code == 200
    assert error_of(kit.raw(b'{"prompt": "a"}'.ljust(101)), 413)["code"] == "body_too_large"


def test_body_limit_holds_without_a_declared_length():
    kit = Kit(max_body_bytes=100)
    read = []

    async def parts():
        for number in range(1000):
            read.append(number)
            yield b" " * 50

    headers = {"content-type": "application/json"}
    error_of(kit.request("POST", "/v1/completions", content=parts(), headers=headers), 413)
    assert len(read) <= 4


def test_unexpected_exceptions_become_a_fixed_500_and_are_logged_once(kit, caplog):
    def broken():
        raise RuntimeError("secret /path")

    kit.client.stats = broken
    kit.app.state.handlers._client.stats = broken
    response = kit.get("/health", headers={"x-request-id": "find-me"})
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text and "find-me" in response.text
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "find-me" in record.getMessage() and record.exc_info


def test_openapi_describes_both_bodies_and_docs_need_no_other_host(kit):
    api = kit.get("/openapi.json").json()
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        route = api["paths"][path]["post"]
        assert field in route["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert {"400", "404", "413", "429", "503"} <= set(route["responses"])
    assert "prompt_cache_key" in api["info"]["description"]
    page = kit.get("/docs")
    assert page.headers["content-type"].startswith("text/html") and "http" not in page.text.replace("httpEquiv", "")


def test_metrics_show_the_clients_counters_and_cannot_be_grown_by_clients(kit):
    metrics = Metrics("toy", max_model_len=64)
    app = create_app(kit.client, kit.text, kit.options, metrics)
    kit.app = app
    kit.client.engine_stats = msgspec.structs.replace(EngineStats(), num_running=3, kv_used_blocks=1, kv_total_blocks=4)
    metrics.finished(
        RequestTimes(
            num_prompt_tokens=3, num_output_tokens=4, finish_reason="stop", queue=0.0, ttft=0.2, prefill=0.2,
            decode=0.3, e2e=0.5, max_tokens=16, n=1, max_output_tokens=4,
        )
    )  # fmt: skip
    text = kit.get("/metrics").text
    assert 'yeoul:num_requests_running{model_name="toy"} 3.0' in text
    assert 'yeoul:kv_cache_usage_perc{model_name="toy"} 0.25' in text
    assert 'yeoul:time_to_first_token_seconds_count{model_name="toy"} 1.0' in text
    for number in range(50):
        kit.request(f"M{number}", f"/path{number}", headers={"x-request-id": f"id{number}"})
        kit.complete(prompt="a", model=f"m{number}", user=f"u{number}")
    after = kit.get("/metrics").text
    assert len(after.splitlines()) == len(text.splitlines())


def test_every_error_is_one_json_object(kit):
    for response in (kit.get("/nowhere"), kit.raw(b"{"), kit.complete(prompt=[-1])):
        assert response.headers["content-type"] == "application/json" and set(json.loads(response.content)) == {"error"}
