"""Fields of both endpoints: types, ranges, nulls, neutral values, unknown names; malformed bodies by the hundred."""

from __future__ import annotations

import json
import random
import time

import pytest
from server_kit import Kit, error_of

from yeoul.server.openapi import CHAT_PROPERTIES, COMPLETION_PROPERTIES
from yeoul.server.wire import call, chat, completions

ENDPOINTS = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}]},
}


@pytest.fixture(scope="module")
def kit():
    return Kit()


def post(kit, path, **fields):
    return kit.request("POST", path, json={**ENDPOINTS[path], **fields})


both = pytest.mark.parametrize("path", ENDPOINTS)

MANY = {str(i): 0 for i in range(301)}
RANGES = [
    ("temperature", [0, 0.0, -0.0, 1, 2.5, 1e6], [-0.1, 1e7, True, "1", [], 10**400]),
    ("top_p", [0, 1e-9, 0.5, 1], [-0.1, 1.1, False, "1"]),
    ("top_k", [-1, 0, 5, 2**31 - 1], [-2, 2**31, 5.0, True, "5"]),
    ("min_p", [0, 1], [-0.1, 1.1, True]),
    ("seed", [0, -1, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 1.5, 1.0, True, "7"]),
    ("n", [1, 8], [0, -1, 9, 4_000_000, 2**63, 1.0, True]),
    ("max_tokens", [1, 2**31 - 1], [0, -1, 2**31, 2**63, 5.0, True, "5"]),
    ("stop", ["x", ["x"] * 16, [], "é" * 128], ["", [""], ["x"] * 17, ["x"] * 300_000, "x" * 257, 5, [5], [None], {}]),
    ("frequency_penalty", [-2, 0, 2.0], [-2.1, 2.1, False, "1"]),
    ("presence_penalty", [-2, 0, 2.0], [-2.1, 2.1, False, "1"]),
    ("repetition_penalty", [1, 0.01, 100], [0, -1, 101, True]),
    (
        "logit_bias",
        [{}, {"0": -100}, {"259": 100.0}, {str(i): 0 for i in range(260)}],
        [
            {"260": 1},
            {"-1": 1},
            {"1.0": 1},
            {"01": 1},
            {"a": 1},
            {"٣": 1},
            {"5": 101},
            {"5": True},
            {"5": None},
            [],
            5,
            MANY,
        ],
    ),
    ("min_tokens", [0], [-1, 2**31, 1.0, True]),
    ("stop_token_ids", [[], [0, 259]], [[260], [-1], [True], [1.0], ["1"], 5, {}, [1] * 129]),
    ("allowed_token_ids", [[0], list(range(260))], [[], [260], [-1], [True], 5]),
    ("bad_words", [[], ["x"] * 64], ["x", [""], ["x"] * 65, ["x" * 257], [5], 5]),
    ("include_stop_str_in_output", [True, False], [0, "true"]),
    ("skip_special_tokens", [True, False], [0, "true"]),
    ("truncate_prompt_tokens", [1, 2**31 - 1], [0, -1, 1.0, True]),
    ("priority", [0, -(2**31), 2**31 - 1], [2**31, 1.0, True]),
    ("cache_salt", ["a", "A-b_c.9" * 18], ["", "a b", "a" * 129, "é", 5]),
    ("return_token_ids", [True, False], [1, "true"]),
    ("ignore_eos", [True, False], [0, 1, "true"]),
    ("stream", [False], [0, 1, "true", []]),
    ("stream_options", [], [[], "x", 1, {"include_usage": 1}]),
    ("model", ["toy"], [5, [], True]),
]
CASES = [(name, value, True) for name, good, _ in RANGES for value in good]
CASES += [(name, value, False) for name, _, bad in RANGES for value in bad]


@both
@pytest.mark.parametrize(("name", "value", "accepted"), CASES, ids=lambda value: str(value)[:20])
def test_ranges(kit, path, name, value, accepted):
    response = post(kit, path, **{name: value})
    if accepted:
        assert response.status_code == 200, response.text
    else:
        error = error_of(response, 400)
        assert error["param"].split(".")[0] == name and name in error["message"] and len(error["message"]) < 300


@pytest.mark.parametrize(
    ("path", "name", "good", "bad"),
    [
        ("/v1/completions", "logprobs", [0, 20], [-1, 21, 10**9, True, 5.0]),
        ("/v1/completions", "echo", [True, False], [0, "true"]),
        ("/v1/completions", "best_of", [1], [2, 0, True]),
        ("/v1/chat/completions", "logprobs", [True, False], [0, 1, 5]),
        ("/v1/chat/completions", "max_completion_tokens", [1], [0, 2**31, 5.0, True]),
    ],
)
def test_ranges_of_one_endpoint(kit, path, name, good, bad):
    for value in good:
        assert post(kit, path, **{name: value}).status_code == 200
    for value in bad:
        assert error_of(post(kit, path, **{name: value}), 400)["param"] == name


def test_top_logprobs_range(kit):
    for value, status in ((0, 200), (20, 200), (21, 400), (-1, 400), (True, 400), (2.0, 400)):
        assert post(kit, "/v1/chat/completions", logprobs=True, top_logprobs=value).status_code == status


def test_v7_refusal_of_huge_values_is_cheap(kit):
    bodies = [{"n": 4_000_000}, {"logprobs": 10**9}, {"stop": ["x"] * 300_000}, {"prompt": ["a"] * 500_000}]
    started = time.perf_counter()
    for body in bodies:
        error_of(post(kit, "/v1/completions", **body), 400)
    assert time.perf_counter() - started < 4
    assert kit.get("/health").status_code == 200


@both
def test_v5_null_is_the_same_as_absence(kit, path):
    module = completions if path == "/v1/completions" else chat
    documented = COMPLETION_PROPERTIES if module is completions else CHAT_PROPERTIES
    names = {*documented, *call.NEUTRAL, *module.NEUTRAL, *call.IGNORED} - set(ENDPOINTS[path])
    plain = stable(post(kit, path))
    assert len(names) > 45 and "cache_salt" in names
    assert stable(post(kit, path, **dict.fromkeys(names))) == plain
    for name in names:
        assert stable(post(kit, path, **{name: None})) == plain, name


def stable(response):
    assert response.status_code == 200, response.text
    body = response.json()
    del body["id"], body["created"]
    return body


@both
def test_neutral_values_are_accepted_and_others_refused_by_name(kit, path):
    module = completions if path == "/v1/completions" else chat
    for name, allowed in {**call.NEUTRAL, **module.NEUTRAL}.items():
        for value in allowed:
            assert post(kit, path, **{name: value}).status_code == 200, name
        error = error_of(post(kit, path, **{name: 0.123}), 400)
        assert error["param"].split(".")[0] == name and name in error["message"] and "not supported" in error["message"]


@both
@pytest.mark.parametrize(
    "fields",
    [
        {"add_special_tokens": False},
    ],
    ids=str,
)
def test_values_that_would_change_the_reply_are_refused(kit, path, fields):
    assert error_of(post(kit, path, **fields), 400)["param"] == next(iter(fields))


def test_tools_are_refused(kit):
    tool = {"type": "function", "function": {"name": "f"}}
    assert error_of(post(kit, "/v1/chat/completions", tools=[tool]), 400)["param"] == "tools"
    assert error_of(post(kit, "/v1/chat/completions", tool_choice="required"), 400)["param"] == "tool_choice"


@both
@pytest.mark.parametrize("name", ["temprature", "Temperature", "", "x" * 1000, "é\n\x1b", "__class__"])
def test_unknown_names_are_refused_by_name(kit, path, name):
    error = error_of(post(kit, path, **{name: 1}), 400)
    assert "unknown field" in error["message"] and len(error["message"]) < 200 and error["message"].isprintable()


@both
def test_ignored_fields_have_no_effect(kit, path):
    values = {name: {"anything": [1]} for name in call.IGNORED}
    assert stable(post(kit, path, **values)) == stable(post(kit, path))


def test_documented_fields_are_the_accepted_ones(kit):
    """A documented field is never unknown or unsupported; its wrong type is refused by its own check."""
    for path, properties in (("/v1/completions", COMPLETION_PROPERTIES), ("/v1/chat/completions", CHAT_PROPERTIES)):
        for name in properties:
            error = error_of(post(kit, path, **{name: {"no": {"such": "value"}}}), 400)
            assert error["param"].startswith(name) and "unsupported" not in error["message"], error


def test_endpoints_do_not_accept_each_others_fields(kit):
    assert error_of(post(kit, "/v1/completions", messages=[]), 400)["param"] == "messages"
    assert error_of(post(kit, "/v1/chat/completions", prompt="a"), 400)["param"] == "prompt"


def test_malformed_bodies_are_always_4xx_and_leave_no_trace(kit):
    """Random mutations of valid bodies: each is refused or answered, none is a 5xx, the answer after is the same."""
    generator = random.Random(7)
    seeds = [
        ("/v1/completions", {"prompt": ["ab", "c"], "max_tokens": 3, "stop": ["\n"], "seed": 5, "stream": False}),
        ("/v1/completions", {"prompt": [[1, 2], [3]], "logprobs": 2, "n": 2, "top_p": 0.5}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "é\n"}], "logprobs": True, "top_logprobs": 1},
        ),
    ]
    plain = stable(post(kit, "/v1/completions"))
    refused = 0
    for round_number in range(400):
        path, body = generator.choice(seeds)
        response = kit.raw(mutate(generator, json.dumps(body).encode()), path)
        assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
        if response.status_code != 200:
            refused += 1
            error_of(response, response.status_code)
        if round_number % 50 == 0:
            assert stable(post(kit, "/v1/completions")) == plain
    assert refused > 200
    assert stable(post(kit, "/v1/completions")) == plain
    assert not kit.client.active


TOKENS = [
    b"NaN",
    b"1e308",
    b"-1",
    b"null",
    b"true",
    b"[",
    b"{",
    b'"',
    b"9" * 400,
    b"\xff",
    b"\\ud800",
    b"\x00",
    b"{}",
    b"[]",
]


def mutate(generator, body):
    for _ in range(generator.randint(1, 4)):
        position = generator.randrange(len(body) + 1)
        kind = generator.randrange(5)
        if kind == 0:
            body = body[:position] + generator.choice(TOKENS) + body[position:]
        elif kind == 1:
            body = body[:position] + body[position + generator.randint(1, 6) :]
        elif kind == 2:
            body = body[:position] + bytes([generator.randrange(256)]) + body[position + 1 :]
        elif kind == 3:
            body = body[:position]
        else:
            body = body.replace(b"1", generator.choice(TOKENS), 1)
    return body
