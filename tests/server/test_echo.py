"""`echo` and prompt scoring on /v1/completions, through a real engine: texts, logprobs, offsets (L2, L3, V13)."""

from __future__ import annotations

import math

import pytest
from engine_kit import EngineKit
from server_kit import events

from yeoul.types import SamplingParams


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def kit(request, tiny_paths):
    kit = EngineKit(tiny_paths[request.param])
    yield kit
    kit.close()


PROMPT = "\n3. x = 20\né"


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_l3_tokens_join_to_the_text_and_offsets_are_prefix_lengths(kit, max_tokens):
    choice = kit.complete(prompt=PROMPT, echo=True, logprobs=2, max_tokens=max_tokens, return_token_ids=True)
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(PROMPT) and choice["finish_reason"] == "length"
    assert len(logprobs["tokens"]) == len(choice["prompt_token_ids"]) + max_tokens
    assert len(choice["token_ids"]) == max_tokens == choice["usage"]["completion_tokens"]
    added = 1 if kit.tokenizer.adds_bos else 0
    pieces = [kit.text.token_bytes(i) for i in (*choice["prompt_token_ids"], *choice["token_ids"])]
    assert b"".join(pieces[added : len(choice["prompt_token_ids"])]).decode() == PROMPT
    starts = [sum(byte & 0xC0 != 0x80 for byte in b"".join(pieces[:i])) for i in range(len(pieces))]
    assert logprobs["text_offset"] == starts
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])


def test_l2_scores_equal_those_of_generation(kit):
    """What was generated with log-probabilities has the same ones when it is a prompt."""
    first = kit.complete(prompt=[9, 10, 11], logprobs=0, max_tokens=8, return_token_ids=True)
    ids = [9, 10, 11, *first["token_ids"]]
    again = kit.complete(prompt=ids, echo=True, logprobs=0, max_tokens=0)
    assert again["logprobs"]["token_logprobs"][3:] == first["logprobs"]["token_logprobs"]
    assert not any(math.isclose(value, 0.0) for value in again["logprobs"]["token_logprobs"][1:])
    assert again["usage"] == {**again["usage"], "prompt_tokens": 11, "completion_tokens": 0}


def test_echo_without_logprobs_and_streams(kit):
    whole = kit.complete(prompt="hello", echo=True, max_tokens=4)
    assert whole["text"] == "hello" + kit.complete(prompt="hello", max_tokens=4)["text"] and whole["logprobs"] is None
    assert kit.complete(prompt="hello", echo=True, max_tokens=0)["text"] == "hello"
    asked = {"prompt": "hello", "echo": True, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    chunks = events(kit.request("/v1/completions", {**asked, "stream": True}))[:-1]
    body = kit.post("/v1/completions", **asked)["choices"][0]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == body["text"]
    offsets = [at for chunk in chunks for at in (chunk["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]]
    assert offsets == body["logprobs"]["text_offset"]


def test_v13_echo_of_several_prompts_and_n(kit):
    asked = {"prompt": ["aa", "bb"], "n": 2, "echo": True, "max_tokens": 1}
    choices = kit.post("/v1/completions", **asked)["choices"]
    assert [(c["index"], c["text"][:2]) for c in choices] == [(0, "aa"), (1, "aa"), (2, "bb"), (3, "bb")]


def test_scores_do_not_show_sampling_rules(kit):
    asked = {"prompt": [9, 10, 11, 12], "echo": True, "logprobs": 1, "max_tokens": 0}
    assert kit.complete(**asked, repetition_penalty=2, logit_bias={"5": 100}) == kit.complete(**asked)


def test_max_tokens_0_needs_echo(kit):
    assert kit.refused("/v1/completions", prompt="a", max_tokens=0)["param"] == "max_tokens"
    assert SamplingParams(max_tokens=0).max_tokens == 0
