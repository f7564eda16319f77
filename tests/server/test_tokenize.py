"""/tokenize, /detokenize, /tokenizer_info: the shapes, and that they say what the generating endpoints do."""

from __future__ import annotations

import pytest
from server_kit import BOS, Kit, error_of

MESSAGES = [{"role": "user", "content": "hi"}]


def tokenize(kit, **body):
    return kit.request("POST", "/tokenize", json=body)


def test_a_text():
    kit = Kit()
    body = tokenize(kit, model="toy", prompt="aé").json()
    assert body == {"count": 4, "max_model_len": 4096, "tokens": [BOS, 97, 195, 169], "token_strs": None}
    kit.complete(prompt="aé")
    assert kit.client.requests[0].prompt_token_ids == body["tokens"]
    assert tokenize(kit, prompt="a", add_special_tokens=False).json()["tokens"] == [97]
    assert tokenize(kit, prompt="a", return_token_strs=True).json()["token_strs"] == ["<256>", "a"]
    assert tokenize(kit, prompt="").json()["count"] == 1


def test_a_conversation():
    kit = Kit()
    body = tokenize(kit, messages=MESSAGES).json()
    kit.chat(messages=MESSAGES)
    assert kit.client.requests[0].prompt_token_ids == body["tokens"]
    assert tokenize(kit, messages=MESSAGES, add_generation_prompt=False).json()["count"] == len("user:hi|")
    tokenize(kit, messages=MESSAGES, chat_template_kwargs={"x": 1})
    assert kit.chat_encoder.seen["variables"] == {"x": 1}


def test_there_and_back():
    kit = Kit()
    tokens = tokenize(kit, prompt="naïve — 🙂").json()["tokens"]
    assert kit.request("POST", "/detokenize", json={"tokens": tokens}).json() == {"prompt": "<256>naïve — 🙂"}
    assert kit.request("POST", "/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert kit.client.requests == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1], "y": 2}, "y"),
    ],
    ids=str,
)
def test_what_is_refused_by_name(path, body, param):
    assert error_of(Kit().request("POST", path, json=body), 400)["param"] == param


def test_other_models_and_texts_that_are_too_long():
    assert error_of(tokenize(Kit(), model="x", prompt="a"), 404)["code"] == "model_not_found"
    error = error_of(tokenize(Kit(max_model_len=8), prompt="a" * 513), 400)
    assert error["code"] == "context_length_exceeded"


def test_tokenizer_info():
    body = Kit().get("/tokenizer_info").json()
    assert body["bos_token_id"] == BOS and body["eos_token"] == "<257>" and body["end_token_ids"] == [257]
    assert body["chat_template"] == "toy" and body["vocab_size"] == 260 and body["model_max_length"] == 4096
    assert Kit(template=False).get("/tokenizer_info").json()["chat_template"] is None


def test_models_say_their_context():
    assert [model["max_model_len"] for model in Kit(max_model_len=64).get("/v1/models").json()["data"]] == [64]
