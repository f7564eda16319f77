"""/v1/completions against a scripted engine: prompts, choices, usage, log-probabilities, streams."""

from __future__ import annotations

import pytest
from server_kit import EOS, FRAGMENT_A, FRAGMENT_B, VOCAB_SIZE, Kit, Step, error_of, events

from yeoul.types import FinishReason, TokenLogprob


def texts(response):
    return [choice["text"] for choice in response.json()["choices"]]


def test_answer_shape_and_usage():
    body = Kit().complete(model="toy", prompt="ab").json()
    assert body["object"] == "text_completion" and body["model"] == "toy" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "AB0", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_four_prompt_forms():
    kit = Kit()
    assert texts(kit.complete(prompt="ab")) == ["AB0"]
    assert texts(kit.complete(prompt=["ab", "cd"])) == ["AB0", "CD0"]
    assert texts(kit.complete(prompt=[97, 98])) == ["AB0"]
    assert texts(kit.complete(prompt=[[97, 98], [99]])) == ["AB0", "C0"]
    assert kit.client.requests[3].prompt_token_ids == [97, 98], "token ids are taken as they are, without BOS"


@pytest.mark.parametrize("stream", [False, True])
def test_v13_choices_are_prompt_major_and_prompts_count_once(stream):
    kit = Kit()
    if not stream:
        body = kit.complete(prompt=["aa", "bb"], n=2).json()
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "AA0"), (1, "AA1"), (2, "BB0"), (3, "BB1")]
        usage = body["usage"]
    else:
        options = {"include_usage": True}
        chunks = events(kit.complete(prompt=["aa", "bb"], n=2, stream=True, stream_options=options))
        joined = {}
        for chunk in chunks[:-2]:
            (choice,) = chunk["choices"]
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
        assert joined == {0: "AA0", 1: "AA1", 2: "BB0", 3: "BB1"}
        usage = chunks[-2]["usage"]
    assert usage["prompt_tokens"] == 6 and usage["completion_tokens"] == 16
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("bad", [999999, -1, VOCAB_SIZE, 2**31, 2**63, 10**400])
@pytest.mark.parametrize("nested", [False, True])
def test_v1_token_ids_out_of_range_are_named(bad, nested):
    kit = Kit()
    error = error_of(kit.complete(prompt=[[1], [5, bad]] if nested else [5, bad]), 400)
    assert error["param"] == "prompt" and str(bad)[:20] in error["message"] and len(error["message"]) < 200
    assert kit.client.requests == []
    assert kit.complete(prompt=[VOCAB_SIZE - 1]).status_code == 200


@pytest.mark.parametrize(
    "prompt", [[1, "a"], ["a", 1], [[1], "a"], [True], [1.0], [[1], []], [[]], {}, 5, True, [None]]
)
def test_malformed_prompts_are_refused(prompt):
    kit = Kit()
    assert error_of(kit.complete(prompt=prompt), 400)["param"] == "prompt"
    assert kit.client.requests == []


def test_v3_empty_prompts():
    with_bos, without_bos = Kit(bos=True), Kit(bos=False)
    assert texts(with_bos.complete(prompt="")) == ["0"]
    assert texts(with_bos.complete(prompt=["a", ""])) == ["A0", "0"]
    for prompt in ("", ["a", ""]):
        error_of(without_bos.complete(prompt=prompt), 400)
    assert without_bos.client.requests == [], "nothing of a refused call is submitted"
    for kit in (with_bos, without_bos):
        error_of(kit.complete(prompt=[]), 400)
        error_of(kit.complete(), 400)
        assert kit.complete(prompt="a").status_code == 200


def test_max_tokens_default_is_16_and_length_is_reported():
    kit = Kit()
    choice = kit.complete(prompt="a" * 30).json()["choices"][0]
    assert choice["text"] == "A" * 16 and choice["finish_reason"] == "length"
    body = kit.complete(prompt="a" * 30, max_tokens=5).json()
    assert body["usage"]["completion_tokens"] == 5 and body["choices"][0]["finish_reason"] == "length"


def test_sampling_fields_reach_the_engine():
    kit = Kit()
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "seed": -7, "n": 2, "ignore_eos": True}
    kit.complete(prompt="a", stop="x", max_tokens=9, logprobs=0, **fields)
    params = kit.client.requests[0].params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.stop == ("x",) and params.max_tokens == 9 and params.logprobs == 0
    kit.complete(prompt="a", stop=["x", "y"])
    assert kit.client.requests[1].params.stop == ("x", "y") and kit.client.requests[1].params.temperature == 1.0


def test_stream_joins_to_the_answer_and_only_the_last_chunk_has_a_finish_reason():
    kit = Kit()
    chunks = events(kit.complete(prompt="abc", stream=True))
    assert chunks.pop() == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1 and all(chunk["object"] == "text_completion" for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == texts(kit.complete(prompt="abc"))[0]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}


def test_held_back_text_makes_no_chunk():
    steps = [
        Step("a "),
        Step("", (98,)),
        Step("", (99,)),
        Step("blue kin", (100,)),
        Step("", (EOS,), (), FinishReason.STOP),
    ]
    chunks = events(Kit(lambda request, index: steps).complete(prompt="x", stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["a ", "blue kin", ""]


def _tie(request, index):
    top = ((FRAGMENT_A, -0.25), (FRAGMENT_B, -0.5), (97, -0.75))
    entry = TokenLogprob(FRAGMENT_A, -0.25, top[: request.params.logprobs])
    dead = TokenLogprob(98, float("-inf"), ((97, 0.0),)[: request.params.logprobs])
    return [Step("", (FRAGMENT_A,), (entry,)), Step("b", (98,), (dead,), FinishReason.LENGTH)]


def test_logprobs_shape_with_byte_fragments_and_minus_infinity():
    response = Kit(_tie).complete(prompt="x", logprobs=3)
    assert response.json()["choices"][0]["logprobs"] == {
        "tokens": ["bytes:\\xf0", "b"],
        "token_logprobs": [-0.25, -9999.0],
        "top_logprobs": [{"bytes:\\xf0": -0.25, "bytes:\\xe2": -0.5, "a": -0.75}, {"a": 0.0, "b": -9999.0}],
        "text_offset": [0, 1],
    }
    plain = Kit(_tie).complete(prompt="x", logprobs=0).json()["choices"][0]["logprobs"]
    assert plain["top_logprobs"] == [{"bytes:\\xf0": -0.25}, {"b": -9999.0}]


def test_logprobs_offsets_are_prefix_lengths_and_streams_agree():
    kit = Kit()
    whole = kit.complete(prompt="abc", logprobs=2).json()["choices"][0]
    logprobs = whole["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["text"] + "<257>", "the end token is shown by its name"
    lengths = [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == lengths
    chunks = events(kit.complete(prompt="abc", logprobs=2, stream=True))[:-1]
    for name in logprobs:
        parts = [chunk["choices"][0]["logprobs"][name] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        assert [value for part in parts for value in part] == logprobs[name]


def test_n_times_prompts_and_prompt_limits():
    kit = Kit()
    assert kit.complete(prompt=["a"] * 32, n=2).status_code == 200
    assert error_of(kit.complete(prompt=["a"] * 32, n=3), 400)["param"] == "n"
    assert error_of(kit.complete(prompt=["a"] * 33), 400)["param"] == "prompt"


def test_a_failed_sequence_is_a_500_with_the_engines_line():
    kit = Kit(lambda request, index: [Step("a"), Step("", (), (), FinishReason.ERROR, "the logits hold a NaN")])
    error = error_of(kit.complete(prompt="x"), 500)
    assert error["message"] == "the logits hold a NaN" and error["code"] == "engine_error"
    streamed = events(kit.complete(prompt="x", stream=True))
    assert streamed[0]["choices"][0]["text"] == "a" and streamed[1]["error"]["message"] == "the logits hold a NaN"
    assert len(streamed) == 2, "no [DONE] after an error"


def test_a_stream_that_fails_before_its_first_output_has_a_true_status():
    kit = Kit(lambda request, index: [Step("", (), (), FinishReason.ERROR, "the logits hold a NaN")])
    error_of(kit.complete(prompt="x", stream=True), 500)


def test_refusal_in_the_middle_of_a_call_submits_nothing_or_aborts_all():
    from yeoul.errors import CapacityError

    kit = Kit()

    def refuse_third_submit(request):
        if len(kit.client.requests) == 2:
            raise CapacityError("too much work waits")

    kit.client.check_hook = refuse_third_submit
    response = kit.complete(prompt=["a", "b", "c"])
    assert error_of(response, 429)["code"] == "queue_full" and response.headers["retry-after"] == "1"
    assert len(kit.client.aborted) == 2 and not kit.client.active
