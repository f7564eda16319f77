"""/v1/chat/completions against a scripted engine: messages, templates, log-probabilities, streams."""

from __future__ import annotations

import pytest
from server_kit import EOS, FRAGMENT_A, FRAGMENT_B, Kit, Step, error_of, events

from yeoul.types import FinishReason, TokenLogprob


def ask(text):
    return [{"role": "user", "content": text}]


def test_answer_shape():
    kit = Kit()
    body = kit.chat(model="toy", messages=ask("hi")).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "USER:HI|ASSISTANT:0", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert body["usage"]["prompt_tokens"] == len("user:hi|assistant:"), "encode_chat adds no BOS"


def test_roles_names_and_content_parts():
    kit = Kit()
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "text", "text": "v"}], "name": "ann"},
        {"role": "assistant", "content": "a", "refusal": None, "tool_calls": [], "annotations": []},
    ]
    assert kit.chat(messages=messages).status_code == 200
    sent = bytes(kit.client.requests[0].prompt_token_ids).decode()
    assert sent == "system:s|developer:d|user:uv|assistant:a|assistant:"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
        ([{"role": "assistant", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages, param):
    assert error_of(Kit().chat(messages=messages), 400)["param"] == param


def test_too_many_messages():
    kit = Kit()
    assert kit.chat(messages=ask("x") * 200).status_code == 200
    error = error_of(kit.chat(messages=ask("x") * 2049), 400)
    assert "2049" in error["message"] and "2048" in error["message"]


def test_c1_template_refusal_is_a_400_with_the_templates_words():
    error = error_of(Kit().chat(messages=ask("refuse me")), 400)
    assert "roles must alternate" in error["message"] and error["param"] == "messages"


def test_c3_model_without_template():
    kit = Kit(template=False)
    assert "template" in error_of(kit.chat(), 400)["message"]
    assert kit.complete(prompt="a").status_code == 200


def test_a_template_that_fails_unexpectedly_is_a_500_without_details():
    kit = Kit()

    def broken(messages, **arguments):
        raise ValueError("secret path")

    kit.chat_encoder.encode = broken
    response = kit.chat()
    assert error_of(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text and response.headers["x-request-id"] in response.text
    assert kit.complete(prompt="a").status_code == 200


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_v9_output_limit_under_both_names(name):
    kit = Kit()
    body = kit.chat(**{name: 5}).json()
    assert body["usage"]["completion_tokens"] == 5 and body["choices"][0]["finish_reason"] == "length"
    assert kit.client.requests[0].params.max_tokens == 5


def test_output_limit_defaults_to_the_context_and_names_must_agree():
    kit = Kit()
    kit.chat()
    assert kit.client.requests[0].params.max_tokens is None
    assert kit.chat(max_tokens=5, max_completion_tokens=5).status_code == 200
    assert error_of(kit.chat(max_tokens=5, max_completion_tokens=6), 400)["param"] == "max_tokens"


@pytest.mark.parametrize(("top", "count"), [(None, 0), (0, 0), (2, 2)])
@pytest.mark.parametrize("stream", [False, True])
def test_l1_logprobs_shape(top, count, stream):
    kit = Kit()
    response = kit.chat(logprobs=True, top_logprobs=top, stream=stream)
    if stream:
        chunks = events(response)[:-1]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        entries = [entry for part in parts if part for entry in part["content"]]
    else:
        choice = response.json()["choices"][0]
        text, entries = choice["message"]["content"], choice["logprobs"]["content"]
        assert entries[-1]["token"] == "<257>" and entries[-1]["bytes"] == []
        assert len(entries) == response.json()["usage"]["completion_tokens"], "the end token has an entry too"
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in entries)
    assert all(len(entry["top_logprobs"]) == count for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text


def test_l1_top_logprobs_needs_logprobs():
    for fields in ({"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False}, {"top_logprobs": 0}):
        assert error_of(Kit().chat(**fields), 400)["param"] == "top_logprobs"


def test_l5_candidates_with_the_same_text_stay_apart():
    top = ((FRAGMENT_A, -0.1), (FRAGMENT_B, -0.2), (97, -0.3), (98, -0.4), (99, -0.5))
    steps = [Step("a", (97,), (TokenLogprob(97, -0.3, top),)), Step("", (EOS,), (), FinishReason.STOP)]
    response = Kit(lambda request, index: steps).chat(logprobs=True, top_logprobs=5)
    candidates = response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [candidate["bytes"] for candidate in candidates] == [[0xF0], [0xE2], [97], [98], [99]]
    assert candidates[0]["token"] == candidates[1]["token"] == "\ufffd"
    assert [candidate["logprob"] for candidate in candidates] == [-0.1, -0.2, -0.3, -0.4, -0.5]


def test_stream_starts_with_the_role_and_joins_to_the_answer():
    kit = Kit()
    chunks = events(kit.chat(stream=True, n=2))
    assert chunks.pop() == "[DONE]"
    joined, seen = {0: "", 1: ""}, set()
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk" and "usage" not in chunk
        (choice,) = chunk["choices"]
        if choice["index"] not in seen:
            assert choice["delta"] == {"role": "assistant", "content": ""}
            seen.add(choice["index"])
        else:
            assert "role" not in choice["delta"]
            joined[choice["index"]] += choice["delta"].get("content", "")
    whole = {c["index"]: c["message"]["content"] for c in kit.chat(n=2).json()["choices"]}
    assert joined == whole and seen == {0, 1}


@pytest.mark.parametrize(
    ("fields", "reason"), [({}, "stop"), ({"max_tokens": 3}, "length")], ids=["end token", "max_tokens"]
)
def test_s5_finish_reason_only_on_the_last_chunk(fields, reason):
    chunks = events(Kit().chat(stream=True, **fields))[:-1]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [reason]


def test_s3_where_usage_appears():
    kit = Kit()
    expected = kit.chat().json()["usage"]
    for fields in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        assert all("usage" not in chunk for chunk in events(kit.chat(stream=True, **fields))[:-1])
    chunks = events(kit.chat(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1] == "[DONE]" and chunks[-2]["choices"] == [] and chunks[-2]["usage"] == expected
    assert all(chunk["usage"] is None for chunk in chunks[:-2])
    for fields in ({"stream_options": {}}, {"stream_options": {"include_usage": True}, "stream": False}):
        assert error_of(kit.chat(**fields), 400)["param"] == "stream_options"
    error = error_of(kit.chat(stream=True, stream_options={"include_usages": True}), 400)
    assert error["param"] == "stream_options.include_usages"


def test_v11_prompt_over_the_context_names_both_numbers():
    kit = Kit(max_model_len=64)
    error = error_of(kit.chat(messages=ask("x" * 100)), 400)
    assert error["code"] == "context_length_exceeded" and "116" in error["message"] and "64" in error["message"]


def test_a_hopelessly_long_prompt_is_refused_before_it_is_tokenized():
    kit = Kit(max_model_len=64)
    for response in (kit.chat(messages=ask("x" * 5000)), kit.complete(prompt="x" * 5000)):
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded" and "4096" in error["message"]
    assert kit.tokenizer.num_encoded == 0
