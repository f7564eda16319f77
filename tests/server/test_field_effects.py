"""One end-to-end test per sampling field, through HTTP and a real engine: its effect, not its acceptance."""

from __future__ import annotations

import pytest
from engine_kit import EngineKit
from server_kit import events


@pytest.fixture(scope="module")
def kit(tiny_llama):
    kit = EngineKit(tiny_llama)
    yield kit
    kit.close()


def ids_of(kit, **body):
    return kit.complete(return_token_ids=True, **body)["token_ids"]


def bias(*token_ids):
    """Makes these ids likeliest, the first one most, further apart than this model's logits."""
    return {str(token_id): 100 - 40 * place for place, token_id in enumerate(token_ids)}


def test_return_token_ids(kit):
    choice = kit.complete(return_token_ids=True)
    assert choice["prompt_token_ids"] == [5, 6, 7] and len(choice["token_ids"]) == 12
    assert kit.tokenizer.decode(choice["token_ids"]) == choice["text"]
    assert "token_ids" not in kit.complete()
    answer = kit.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=2, return_token_ids=True
    )
    assert answer["prompt_token_ids"] == kit.tokenizer.encode_chat(
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(answer["choices"][0]["token_ids"]) <= 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_return_token_ids_in_streams(kit, path):
    asked = {"prompt": [5, 6]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    asked |= {"stream": True, "return_token_ids": True, "ignore_eos": True, "max_tokens": 6, "seed": 1, "n": 2}
    chunks = events(kit.request(path, asked))[:-1]
    found = {0: [], 1: []}
    with_prompt = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        found[choice["index"]] += choice.get("token_ids", [])
        if "prompt_token_ids" in chunk or "prompt_token_ids" in choice:
            with_prompt.append(choice["index"])
    assert len(found[0]) == len(found[1]) == 6 and sorted(with_prompt) == [0, 1]


def test_logit_bias(kit):
    assert ids_of(kit, logit_bias={"100": 100}) == [100] * 12
    assert ids_of(kit, logit_bias={str(ids_of(kit)[0]): -100})[0] != ids_of(kit)[0]


def test_frequency_penalty(kit):
    far = {"logit_bias": {"90": 100, "91": 75}, "max_tokens": 40}
    assert set(ids_of(kit, **far)) == {90}
    assert {90, 91} == set(ids_of(kit, **far, frequency_penalty=2))


def test_presence_penalty(kit):
    few = {"allowed_token_ids": list(range(60, 160)), "max_tokens": 40}
    assert len(set(ids_of(kit, **few, presence_penalty=2))) > len(set(ids_of(kit, **few)))
    assert len(set(ids_of(kit, **few, presence_penalty=-2))) <= len(set(ids_of(kit, **few)))


def test_repetition_penalty_counts_the_prompt(kit):
    """Divided by 100, the logit of what was seen can hardly win again."""
    plain = ids_of(kit, max_tokens=1)[0]
    again = kit.complete(prompt=[plain, 5, 6, 7], logit_bias={}, max_tokens=1, return_token_ids=True)["token_ids"]
    penalized = ids_of(kit, prompt=[5, 6, 7, *again], max_tokens=12, repetition_penalty=100)
    assert len(set(penalized)) == 12 and not {5, 6, 7, *again} & set(penalized)


def test_logprobs_are_of_the_unmodified_distribution(kit):
    plain = kit.complete(logprobs=3, max_tokens=1)["logprobs"]
    forced = kit.complete(logprobs=3, max_tokens=1, logit_bias={"100": 100})["logprobs"]
    assert plain["top_logprobs"][0].items() <= forced["top_logprobs"][0].items()
    assert forced["token_logprobs"][0] < min(plain["top_logprobs"][0].values())


def test_min_tokens_and_stop_token_ids(kit):
    assert ids_of(kit, logit_bias=bias(90), stop_token_ids=[90]) == [90]
    assert ids_of(kit, logit_bias=bias(90, 91), stop_token_ids=[90], min_tokens=4) == [91, 91, 91, 91, 90]
    assert kit.complete(logit_bias=bias(90), stop_token_ids=[90])["finish_reason"] == "stop"


def test_min_tokens_bans_the_models_end_tokens(kit):
    end = next(iter(kit.tokenizer.end_ids))
    ended = kit.complete(logit_bias=bias(end, 90), ignore_eos=False, min_tokens=3, return_token_ids=True)
    assert ended["token_ids"] == [90, 90, 90, end] and ended["finish_reason"] == "stop"
    assert kit.complete(logit_bias=bias(end), ignore_eos=False)["usage"]["completion_tokens"] == 1


def test_p7_stop_strings_do_not_match_before_min_tokens(kit):
    newline = kit.tokenizer.encode("\n", add_special=False)[0]
    asked = {"logit_bias": bias(newline), "stop": ["\n"], "max_tokens": 20}
    assert kit.complete(**asked)["usage"]["completion_tokens"] == 1
    late = kit.complete(**asked, min_tokens=8)
    assert late["usage"]["completion_tokens"] == 9 and late["text"] == "\n" * 8 and late["finish_reason"] == "stop"


def test_include_stop_str_in_output(kit):
    (a,) = kit.tokenizer.encode("a", add_special=False)
    asked = {"logit_bias": bias(a), "stop": ["aaa"]}
    assert kit.complete(**asked)["text"] == ""
    assert kit.complete(**asked, include_stop_str_in_output=True)["text"] == "aaa"
    by_id = {"logit_bias": bias(a), "stop_token_ids": [a], "min_tokens": 0}
    assert kit.complete(**by_id)["text"] == ""
    assert kit.complete(**by_id, include_stop_str_in_output=True)["text"] == "a"


def test_skip_special_tokens(kit):
    special = kit.tokenizer.encode("<|im_start|>", add_special=False, parse_special=True)[0]
    assert kit.complete(logit_bias=bias(special), max_tokens=2)["text"] == ""
    shown = kit.complete(logit_bias=bias(special), max_tokens=2, skip_special_tokens=False)
    assert shown["text"] == "<|im_start|>" * 2


def test_allowed_token_ids(kit):
    assert set(ids_of(kit, allowed_token_ids=[70, 71], temperature=1, seed=2, max_tokens=40)) == {70, 71}


def test_bad_words(kit):
    (a,) = kit.tokenizer.encode("a", add_special=False)
    (b,) = kit.tokenizer.encode("b", add_special=False)
    assert kit.complete(logit_bias=bias(a, b), max_tokens=3)["text"] == "aaa"
    assert kit.complete(logit_bias=bias(a, b), max_tokens=3, bad_words=["a"])["text"] == "bbb"
    assert kit.chat(logit_bias=bias(a, b), max_tokens=3, bad_words=["a"])["message"]["content"] == "bbb"


def test_truncate_prompt_tokens(kit):
    whole = kit.complete(prompt=[6, 7], return_token_ids=True)
    cut = kit.complete(prompt=[1, 2, 3, 4, 5, 6, 7], truncate_prompt_tokens=2, return_token_ids=True)
    assert cut == whole and cut["usage"]["prompt_tokens"] == 2


def test_continuous_usage_stats(kit):
    asked = {"prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True, "stream": True, "return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(kit.request("/v1/completions", {**asked, "stream_options": options}))[:-1]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 4, 5, 5] and {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
    chunks = events(kit.request("/v1/completions", {**asked, "stream_options": {"include_usage": True}}))[:-1]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 5
    refusal = kit.refused("/v1/completions", **{**asked, "stream_options": {"continuous_usage_stats": True}})
    assert refusal["param"] == "stream_options.continuous_usage_stats"


def test_priority_and_cache_salt_reach_the_engine(kit, monkeypatch):
    seen = []
    monkeypatch.setattr(kit.engine, "check", seen.append)
    kit.complete(priority=-3, cache_salt="tenant.1")
    assert {(request.priority, request.cache_salt) for request in seen} == {(-3, "tenant.1")}


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30])
def test_p1_very_low_temperatures_are_greedy(kit, temperature):
    assert ids_of(kit, temperature=temperature, seed=1, max_tokens=60) == ids_of(kit, max_tokens=60)


def test_p3_top_p(kit):
    greedy = ids_of(kit)
    for top_p in (0, 1e-9):
        assert ids_of(kit, temperature=1, seed=1, top_p=top_p) == greedy
    assert ids_of(kit, temperature=1, seed=1, top_p=1.0) == ids_of(kit, temperature=1, seed=1)


def test_p9_samples_differ(kit):
    def texts(**body):
        asked = {"prompt": [5, 6, 7], "n": 8, "temperature": 1, "max_tokens": 8, "ignore_eos": True, **body}
        return [choice["text"] for choice in kit.post("/v1/completions", **asked)["choices"]]

    flat = {"allowed_token_ids": list(range(60, 92))}
    assert len(set(texts(**flat))) > 1
    assert texts(**flat) != texts(**flat)
    assert texts(**flat, seed=7) == texts(**flat, seed=7)


def test_l5_entries_of_chat_are_told_apart_by_bytes(kit):
    first = kit.tokenizer.encode("é", add_special=False)[0]
    entry = kit.chat(logprobs=True, top_logprobs=5, max_tokens=1, logit_bias=bias(first))["logprobs"]["content"][0]
    assert len(entry["top_logprobs"]) == 5 and entry["bytes"] == [0xC3]
    values = [one["logprob"] for one in entry["top_logprobs"]]
    assert values == sorted(values, reverse=True)


def test_a_batch_of_all_kinds_equals_solo_answers(kit):
    bodies = [
        {},
        {"frequency_penalty": 1.5, "logprobs": 2},
        {"repetition_penalty": 1.7, "temperature": 1, "seed": 5},
        {"logit_bias": bias(90, 91), "presence_penalty": 1.9},
        {"allowed_token_ids": [60, 61, 62], "temperature": 1, "seed": 6, "n": 3},
        {"min_tokens": 5, "ignore_eos": False, "bad_words": ["the"]},
    ]
    asked = [{"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True, "max_tokens": 20, **body} for body in bodies]

    def choices(response):
        assert response.status_code == 200, response.text
        return response.json()["choices"]

    solo = [choices(kit.request("/v1/completions", body)) for body in asked]
    together = kit.together([("/v1/completions", body) for body in asked])
    assert [choices(response) for response in together] == solo


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/completions", "max_tokens"),
    ],
)
def test_v9_the_limit_holds_under_both_names(kit, path, name):
    asked = {"prompt": [5, 6]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    banned = {str(end): -100 for end in kit.tokenizer.end_ids}
    answer = kit.post(path, **asked, **{name: 5}, logit_bias=banned)
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "length"


def test_s7_stop_strings_leave_the_models_own_end_tokens_alone(kit):
    end = next(iter(kit.tokenizer.end_ids))
    asked = {"logit_bias": {str(end): 100, "90": 50}, "min_tokens": 2, "ignore_eos": False, "return_token_ids": True}
    plain, stopped = kit.complete(**asked), kit.complete(**asked, stop=["zzz"])
    assert plain == stopped and plain["finish_reason"] == "stop" and plain["token_ids"] == [90, 90, end]
