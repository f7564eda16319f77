"""Tools, reasoning and the template's options on /v1/chat/completions: what the template gets, what a client reads."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from server_kit import EOS, Kit, Step, error_of, events

from yeoul.server.replies.reader import ReplyFormats
from yeoul.types import FinishReason

TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Seoul"}}\n</tool_call>'
FORMATS = ReplyFormats(tools="hermes", reasoning=False, shows_tools=True)
USER = {"role": "user", "content": "hi"}
HISTORY = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Seoul"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
]


def saying(*pieces, end=FinishReason.STOP):
    """A script: every sequence says these pieces."""

    def script(request, index):
        return [*(Step(piece) for piece in pieces), Step("", (EOS,), end=end)]

    return script


def kit_saying(text, formats=FORMATS, size=3, **options):
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return Kit(saying(*pieces, **options), formats=formats)


def streamed(response):
    """(deltas joined by field, finish reason, chunks) of a stream that the openai client can read."""
    chunks = [ChatCompletionChunk.model_validate(chunk) for chunk in events(response)[:-1]]
    reasoning, content, calls, reason = "", "", {}, None
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, [call.id, call.function.name, ""])
            known[2] += call.function.arguments
        assert reason is None
        reason = choice.finish_reason
    return (reasoning, content, [tuple(call) for call in calls.values()], reason), chunks


def test_a_tool_call_whole_and_streamed():
    kit = kit_saying(f"Let me see.\n{CALL}\n{CALL}")
    body = kit.chat(tools=[TOOL], tool_choice="auto").json()
    (choice,) = ChatCompletion.model_validate(body).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see.\n"
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Seoul"}] * 2
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2 and all(call_id.startswith("call_") for call_id in ids)
    (reasoning, content, calls, reason), chunks = streamed(kit.chat(tools=[TOOL], stream=True))
    assert (reasoning, content, reason) == ("", "Let me see.\n", "tool_calls")
    assert [call[1:] for call in calls] == [("weather", '{"city": "Seoul"}')] * 2
    deltas = [c.choices[0].delta for c in chunks]
    assert sum(bool(delta.tool_calls) for delta in deltas) > 8, "arguments come while they are written"
    assert "USER" not in content and not any("<tool" in (delta.content or "") for delta in deltas)


def test_a_call_alone_has_no_content_and_parallel_calls_can_be_refused():
    kit = kit_saying(CALL + CALL)
    message = kit.chat(tools=[TOOL]).json()["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 2
    assert len(kit.chat(tools=[TOOL], parallel_tool_calls=False).json()["choices"][0]["message"]["tool_calls"]) == 1
    (_, _, calls, reason), _ = streamed(kit.chat(tools=[TOOL], parallel_tool_calls=False, stream=True))
    assert len(calls) == 1 and reason == "tool_calls"


def test_without_tools_the_same_text_is_content():
    kit = kit_saying(CALL)
    for fields in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = kit.chat(**fields).json()["choices"][0]
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
        assert not kit.chat_encoder.seen["tools"]
    kit.chat(tools=[TOOL])
    assert kit.chat_encoder.seen["tools"] == [TOOL]


def test_a_call_that_was_cut_off_ends_with_length():
    kit = kit_saying(CALL[:60], end=FinishReason.LENGTH)
    choice = kit.chat(tools=[TOOL]).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Seoul'


def test_what_the_template_gets_of_calls_and_results():
    kit = Kit(formats=FORMATS)
    assert kit.chat(messages=HISTORY, tools=[TOOL]).status_code == 200
    _, assistant, tool = kit.chat_encoder.seen["messages"]
    assert assistant == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Seoul"}}}
        ],
    }
    assert tool == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}


def test_an_answers_own_message_can_be_sent_back():
    kit = kit_saying(f"<think>hm</think>{CALL}", ReplyFormats(tools="hermes", reasoning=True, shows_tools=True))
    message = kit.chat(tools=[TOOL]).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    assert kit.chat(messages=[USER, message, result], tools=[TOOL]).status_code == 200


def call_with(**changes):
    call = HISTORY[1]["tool_calls"][0]
    return [USER, {"role": "assistant", "content": None, "tool_calls": [{**call, **changes}]}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{**TOOL, "type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": call_with(type="custom")}, "messages[1].tool_calls[0].type"),
        ({"messages": call_with(id=None)}, "messages[1].tool_calls[0].id"),
        ({"messages": call_with(function=None)}, "messages[1].tool_calls[0].function"),
        ({"messages": call_with(function={"arguments": "{}"})}, "messages[1].tool_calls[0].function.name"),
        ({"messages": call_with(function={"name": "f", "arguments": "[1]"})},
         "messages[1].tool_calls[0].function.arguments"),
        ({"messages": call_with(function={"name": "f", "arguments": "{NaN"})},
         "messages[1].tool_calls[0].function.arguments"),
        ({"messages": call_with(function={"name": "f", "arguments": {}})},
         "messages[1].tool_calls[0].function.arguments"),
        ({"messages": [{**USER, "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]}, "messages[1].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_what_is_refused_by_name(fields, param):
    assert error_of(Kit(formats=FORMATS).chat(**fields), 400)["param"] == param


@pytest.mark.parametrize("formats", [ReplyFormats(), ReplyFormats(tools="hermes"), ReplyFormats(shows_tools=True)])
def test_a_model_without_tools_says_so(formats):
    error = error_of(Kit(formats=formats).chat(tools=[TOOL]), 400)
    assert error["param"] == "tools" and "template" in error["message"] and "--tool-call-parser" in error["message"]
    assert Kit(formats=formats).chat(tools=[TOOL], tool_choice="none").status_code == 200


THINKS = ReplyFormats(reasoning=True, shows_tools=True, tools="hermes")


def test_reasoning_whole_and_streamed_with_tools():
    kit = kit_saying(f"<think>\nhm, well\n</think>\n\nSo: {CALL}", THINKS)
    message = kit.chat(tools=[TOOL]).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, well", "So: ")
    assert message["tool_calls"][0]["function"]["name"] == "weather"
    (reasoning, content, calls, reason), _ = streamed(kit.chat(tools=[TOOL], stream=True))
    assert (reasoning, content, len(calls), reason) == ("hm, well", "So: ", 1, "tool_calls")


def test_no_reasoning_is_null_and_other_models_have_no_such_member():
    assert kit_saying("yes", THINKS).chat().json()["choices"][0]["message"]["reasoning_content"] is None
    assert "reasoning_content" not in kit_saying("yes", FORMATS).chat().json()["choices"][0]["message"]
    cut = kit_saying("<think>well", THINKS, end=FinishReason.LENGTH).chat().json()["choices"][0]
    assert (cut["message"]["reasoning_content"], cut["message"]["content"]) == ("well", "")


def test_logprobs_of_all_tokens_stay_with_a_reply_that_is_split():
    def script(request, index):
        from server_kit import _logprob

        return [Step(c, logprobs=(_logprob(ord(c), 0),), end=None) for c in "<think>a</think>b"] + [
            Step("", (EOS,), end=FinishReason.STOP)
        ]

    kit = Kit(script, formats=THINKS)
    whole = kit.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    chunks = events(kit.chat(logprobs=True, stream=True))[:-1]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole and len(whole) == 17


def test_template_kwargs_reach_the_template():
    kit = Kit()
    given = {"enable_thinking": False, "depth": 5, "names": ["a", 1, None], "x": None}
    assert kit.chat(chat_template_kwargs=given).status_code == 200
    assert kit.chat_encoder.seen["variables"] == given


@pytest.mark.parametrize(
    "given",
    [{"messages": []}, {"tools": []}, {"bos_token": "x"}, {"_x": 1}, {"a b": 1}, {"x": {"a": 1}}, {"x": [[1]]},
     {f"k{i}": 1 for i in range(33)}, [], "x"],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_template_kwargs_that_are_refused(given):
    error = error_of(Kit().chat(chat_template_kwargs=given), 400)
    assert error["param"].split(".")[0] == "chat_template_kwargs"


def test_continue_final_message_and_generation_prompt():
    kit = Kit()
    messages = [USER, {"role": "assistant", "content": "It is"}]

    def sent(**fields):
        assert kit.chat(messages=messages, **fields).status_code == 200
        return bytes(kit.client.requests[-1].prompt_token_ids).decode()

    assert sent() == "user:hi|assistant:It is|assistant:"
    assert sent(add_generation_prompt=False) == "user:hi|assistant:It is|"
    assert sent(continue_final_message=True) == "user:hi|assistant:It is"
    assert sent(continue_final_message=True, add_generation_prompt=False) == "user:hi|assistant:It is"
    error = error_of(kit.chat(messages=messages, continue_final_message=True, add_generation_prompt=True), 400)
    assert error["param"] == "continue_final_message"
    assert error_of(kit.chat(messages=[USER], continue_final_message=True), 400)["param"] == "continue_final_message"
