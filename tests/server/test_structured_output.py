"""`response_format` and `structured_outputs` over HTTP: effects, refusals, mixed traffic; 200 schemas with SmolLM2."""

from __future__ import annotations

import json
import re

import pytest
from engine_kit import EngineKit
from server_kit import events

from yeoul.weights.catalogue import find_model

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def kit(tiny_llama):
    kit = EngineKit(tiny_llama)
    yield kit
    kit.close()


def ask(kit, **body):
    return kit.chat(temperature=1, max_tokens=120, ignore_eos=False, **body)["message"]["content"]


def is_city(text):
    value = json.loads(text)
    return set(value) == {"city", "size"} and len(value["city"]) <= 12 and value["size"] in ("small", "large")


def test_json_schema(kit):
    for seed in range(5):
        assert is_city(ask(kit, seed=seed, response_format=FORMAT))
        assert is_city(ask(kit, seed=seed, structured_outputs={"json": SCHEMA}))
    assert is_city(ask(kit, seed=1, structured_outputs={"json": json.dumps(SCHEMA)}))
    text = kit.complete(temperature=1, seed=1, max_tokens=120, response_format=FORMAT)["text"]
    assert is_city(text)


@pytest.mark.parametrize(
    "field", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_json_object(kit, field):
    """A random model may not close the object in time; how it begins shows the effect."""
    assert ask(kit, seed=2, **field).lstrip().startswith("{")


def test_regex_choice_grammar_and_text(kit):
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", ask(kit, structured_outputs={"regex": "[a-c]{3}-[0-9]{2}"}))
    assert ask(kit, structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert ask(kit, structured_outputs={"grammar": 'start: "x" /[0-9]/'}) in [f"x{digit}" for digit in range(10)]
    assert kit.chat(response_format={"type": "text"}) == kit.chat()


def test_streams_have_the_same_text(kit):
    body = {"messages": MESSAGES, "seed": 4, "max_tokens": 120, "response_format": FORMAT}
    chunks = events(kit.request("/v1/chat/completions", {**body, "stream": True}))[:-1]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == kit.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"] and is_city(text)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "?"}}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 1025}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
    ],
    ids=str,
)
def test_refusals_name_the_field(kit, field, param):
    plain = kit.chat(max_tokens=3)
    error = kit.refused("/v1/chat/completions", messages=MESSAGES, **field)
    assert error["param"] == param and len(error["message"]) < 500
    assert kit.chat(max_tokens=3) == plain


def test_mixed_traffic_equals_solo_answers(kit):
    calls = []
    for seed in range(6):
        body = {"messages": MESSAGES, "seed": seed, "max_tokens": 60, "logprobs": True, "top_logprobs": 1}
        calls.append(("/v1/chat/completions", {**body, "response_format": FORMAT}))
        calls.append(("/v1/chat/completions", {**body, "ignore_eos": True}))
        calls.append(
            ("/v1/completions", {"prompt": [5, seed], "seed": seed, "structured_outputs": {"regex": "[ab]{30}"}})
        )
    solo = [kit.request(*call).json()["choices"] for call in calls]
    assert [response.json()["choices"] for response in kit.together(calls)] == solo


@pytest.mark.timeout(600)
@pytest.mark.models
def test_200_of_200_schemas_are_valid_at_32_at_once_with_smollm2():
    kit = EngineKit(find_model("smollm2-135m"), num_threads=2)
    try:
        body = {"messages": [{"role": "user", "content": "Name a city and say how large it is."}], "max_tokens": 200}
        calls = [("/v1/chat/completions", {**body, "seed": seed, "response_format": FORMAT}) for seed in range(200)]
        valid = 0
        for first in range(0, 200, 32):
            for response in kit.together(calls[first : first + 32]):
                valid += is_city(response.json()["choices"][0]["message"]["content"])
        assert valid == 200
    finally:
        kit.close()
