"""/v1/responses against a scripted engine: the openai client's types read every event; joined deltas are the whole."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server_kit import EOS, Kit, Step, error_of

from yeoul.server.replies.reader import ReplyFormats
from yeoul.types import FinishReason

EVENT = TypeAdapter(ResponseStreamEvent)


def respond(kit, **body):
    return kit.request("POST", "/v1/responses", json={"input": "hi", **body})


def stream_of(response):
    """The events, each parsed by the client's own types."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(EVENT.validate_python(json.loads(data.removeprefix("data: "))))
        assert name == f"event: {events[-1].type}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def sent(kit):
    return bytes(kit.client.requests[-1].prompt_token_ids).decode()


def test_whole_answer():
    kit = Kit()
    body = respond(kit, instructions="be kind", metadata={"a": "b"}, temperature=0.5, max_output_tokens=200).json()
    response = Response.model_validate(body)
    assert response.output_text == "SYSTEM:BE KIND|USER:HI|ASSISTANT:0" and response.status == "completed"
    assert sent(kit) == "system:be kind|user:hi|assistant:"
    assert (
        response.usage.input_tokens == len(sent(kit)) and response.usage.output_tokens == len(response.output_text) + 1
    )
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.metadata, response.temperature, response.max_output_tokens) == ({"a": "b"}, 0.5, 200)
    assert response.id.startswith("resp_") and response.incomplete_details is None


def test_stream_builds_the_same_answer():
    kit = Kit()
    whole = Response.model_validate(respond(kit).json())
    events = stream_of(respond(kit, stream=True))
    types = [event.type for event in events]
    assert types[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert types[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.completed"]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert text == whole.output_text == last.output_text == events[-4].text
    assert last.usage == whole.usage and events[0].response.output == [] and events[0].response.usage is None


def test_the_limit_makes_it_incomplete():
    kit = Kit()
    response = Response.model_validate(respond(kit, max_output_tokens=3).json())
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert stream_of(respond(kit, max_output_tokens=3, stream=True))[-1].type == "response.incomplete"


def test_messages_and_an_earlier_answer_as_input():
    kit = Kit()
    answer = respond(kit).json()["output"]
    items = [{"role": "user", "content": "one"}, {"type": "message", "role": "assistant", "content": "two"},
             {"role": "developer", "content": [{"type": "input_text", "text": text} for text in "ab"]},
             *answer, {"role": "user", "content": "go"}]  # fmt: skip
    assert respond(kit, input=items).status_code == 200
    assert sent(kit) == "user:one|assistant:two|developer:ab|assistant:USER:HI|ASSISTANT:0|user:go|assistant:"


def thinking(request, index):
    pieces = ["<think>", "hm", " ok", "</think>", "yes", " sir"]
    return [*map(Step, pieces), Step("", (EOS,), end=FinishReason.STOP)]


def test_reasoning_is_an_item_of_its_own():
    kit = Kit(thinking, formats=ReplyFormats(reasoning=True))
    body = respond(kit).json()
    response = Response.model_validate(body)
    assert [item.type for item in response.output] == ["reasoning", "message"] and response.output_text == "yes sir"
    assert response.output[0].content[0].text == "hm ok"
    assert response.usage.output_tokens_details.reasoning_tokens == len("<think>hm ok</think>")
    events = stream_of(respond(kit, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "hm ok"
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    assert respond(kit, input=[{"role": "user", "content": "x"}, *body["output"]]).status_code == 200
    assert kit.chat_encoder.seen["messages"][-1]["reasoning_content"] == "hm ok"


def test_an_answer_without_text_has_an_empty_message():
    kit = Kit(lambda request, index: [Step("", (EOS,), end=FinishReason.STOP)])
    assert Response.model_validate(respond(kit).json()).output_text == ""
    assert stream_of(respond(kit, stream=True))[-1].response.output[0].content[0].text == ""


def test_an_error_in_mid_stream_is_an_event():
    kit = Kit(lambda request, index: [Step("a"), Step("", (), end=FinishReason.ERROR, error="it broke")])
    last = stream_of(respond(kit, stream=True))[-1]
    assert last.type == "error" and last.message == "it broke" and last.code == "engine_error"
    assert error_of(respond(kit), 500)["message"] == "it broke"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "text": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": "x", "weight": 1}]}, "input[0].weight"),
        ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}]}, "input"),
        ({"input": "x" * 70, "instructions": 5}, "instructions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused_by_name(fields, param):
    assert error_of(respond(Kit(), **fields), 400)["param"] == param
