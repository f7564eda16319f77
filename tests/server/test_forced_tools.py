"""tool_choice "required" and named functions, with a real engine: even a random model calls as it must."""

from __future__ import annotations

import json

import pytest
from engine_kit import EngineKit
from server_kit import events
from tiny import tiny_model

from yeoul.server.app import create_app
from yeoul.server.options import ServerOptions
from yeoul.server.replies.reader import formats_of

SHOWS_TOOLS = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{{ tools | tojson }}"
FORMATS = {"hermes": SHOWS_TOOLS + "<tool_call>", "llama3_json": SHOWS_TOOLS}
THINKING = SHOWS_TOOLS + "<think>"


def tool(name, **properties):
    parameters = {"properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


TOOLS = [tool("weather", city={"enum": ["Seoul", "Rome"]}), tool("add", a={"enum": [1, 2]}, b={"type": "boolean"})]


def kit_of(folder, template, tools_format):
    model = tiny_model(folder, "llama", chat_template=template, name="tools")
    kit = EngineKit(model, max_num_seqs=4)
    formats = formats_of(template, tool_call_parser=tools_format)
    assert formats.shows_tools
    kit.app = create_app(kit.client, kit.text, ServerOptions(port=0), formats=formats)
    return kit


@pytest.fixture(scope="module", params=FORMATS)
def kit(request, tmp_path_factory):
    kit = kit_of(tmp_path_factory.mktemp("tools"), FORMATS[request.param], request.param)
    yield kit
    kit.close()


def calls_of(choice):
    assert choice["finish_reason"] == "tool_calls", choice
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def ask(kit, **fields):
    fields = {"tools": TOOLS, "ignore_eos": False, "max_tokens": 400, "temperature": 1.0, **fields}
    return kit.chat(**fields)


def check(name, arguments):
    if name == "weather":
        assert arguments in ({"city": "Seoul"}, {"city": "Rome"})
    else:
        assert name == "add" and set(arguments) == {"a", "b"} and arguments["a"] in (1, 2)
        assert isinstance(arguments["b"], bool)


@pytest.mark.parametrize("seed", range(4))
def test_required(kit, seed):
    for name, arguments in calls_of(ask(kit, tool_choice="required", parallel_tool_calls=False, seed=seed)):
        check(name, arguments)


@pytest.mark.parametrize("name", ["weather", "add"])
def test_a_function_by_name(kit, name):
    choice = {"type": "function", "function": {"name": name}}
    ((called, arguments),) = calls_of(ask(kit, tool_choice=choice, seed=5))
    assert called == name
    check(called, arguments)


def test_a_stream_has_the_same_call(kit):
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 7}
    ((name, arguments),) = calls_of(ask(kit, **fields))
    body = {"messages": [{"role": "user", "content": "hello there"}], "tools": TOOLS, "max_tokens": 400, "stream": True}
    chunks = events(kit.request("/v1/chat/completions", {**body, **fields}))[:-1]
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert deltas[0]["function"]["name"] == name
    assert json.loads("".join(call["function"]["arguments"] for call in deltas)) == arguments


def test_a_schema_that_makes_no_sense_is_refused(kit):
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "?"}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [bad], "tool_choice": "required"}
    response = kit.request("/v1/chat/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "tools", response.text


def test_an_opened_reasoning_goes_on_before_the_call(tmp_path):
    kit = kit_of(tmp_path, THINKING, "hermes")
    choice = ask(kit, tool_choice="required", seed=1, max_tokens=20)
    assert choice["message"]["reasoning_content"] and not choice["message"]["content"]
    assert choice["finish_reason"] == "length", "a random model does not end its reasoning"
    kit.close()
