"""Edited logits in whole engines on tiny models: replies equal solo ones and the oracle's; fields do what they say."""

import pytest

from yeoul.engine.llm import LLM
from yeoul.errors import RequestError
from yeoul.types import FinishReason, SamplingParams

PROMPTS = [[5, 6, 7], [8] * 20, [9, 10] * 15, list(range(20, 60)), [5, 6, 7], [30, 31, 30]]


def params(**fields):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **fields})


MIXED = [
    params(logprobs=2),
    params(frequency_penalty=1.5, presence_penalty=0.5, logprobs=1),
    params(repetition_penalty=1.8, temperature=0.9, seed=3),
    params(logit_bias={17: 4.0, 40: -100.0}, temperature=1.0, seed=4, n=2),
    params(allowed_token_ids=tuple(range(50, 90)), temperature=1.5, seed=5, top_p=0.9),
    params(min_tokens=9, ignore_eos=False, bad_words=("the", "a"), repetition_penalty=1.1, logprobs=3),
]


def replies(llm, prompts, each):
    outputs = llm.generate(prompts, each)
    return [
        [(one.text, tuple(one.token_ids), tuple(one.logprobs), one.finish_reason) for one in o.outputs] for o in outputs
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_edited_and_plain_rows_do_not_disturb_each_other_and_preemption_shows_nowhere(tiny_paths, family):
    options = dict(executor="native", num_threads=2, seed=1)
    with LLM(str(tiny_paths[family]), **options) as llm:
        solo = [replies(llm, [prompt], [own])[0] for prompt, own in zip(PROMPTS, MIXED, strict=True)]
        assert replies(llm, PROMPTS, MIXED) == solo
    with LLM(str(tiny_paths[family]), num_kv_blocks=9, max_num_batched_tokens=24, **options) as llm:
        assert replies(llm, PROMPTS, MIXED) == solo
        assert llm.engine.stats().preemptions > 0
    assert solo[0] != solo[4]


def test_the_oracle_samples_the_same_tokens(tiny_llama):
    """Float64 and int8 activations differ a little; biases far apart leave the decision to the edits."""
    each = [params(logit_bias={i: 100.0 - 4 * i for i in range(12)}, frequency_penalty=2.0, presence_penalty=1.0)]
    found = []
    for executor in ("native", "reference"):
        with LLM(str(tiny_llama), executor=executor, num_threads=1) as llm:
            found.append(llm.generate([[5, 6, 7]], each)[0].outputs[0].token_ids)
    assert found[0] == found[1] and len(set(found[0])) > 3


def first(llm, prompt, **fields):
    return llm.generate([prompt], params(**fields))[0].outputs[0]


def test_each_field_does_what_it_says(tiny_llama):
    with LLM(str(tiny_llama), num_threads=1) as llm:
        plain = first(llm, [5, 6, 7])
        top = plain.token_ids[0]
        forced = first(llm, [5, 6, 7], logit_bias={100: 100.0})
        assert set(forced.token_ids) == {100}
        assert first(llm, [5, 6, 7], logit_bias={top: -100.0}).token_ids[0] != top
        assert set(first(llm, [5, 6, 7], allowed_token_ids=(70, 71)).token_ids) <= {70, 71}
        ended = first(llm, [5, 6, 7], stop_token_ids=(plain.token_ids[3],))
        at = plain.token_ids.index(plain.token_ids[3])
        assert ended.token_ids == plain.token_ids[: at + 1] and ended.finish_reason is FinishReason.STOP
        later = first(llm, [5, 6, 7], stop_token_ids=(plain.token_ids[3],), min_tokens=10)
        assert len(later.token_ids) >= 10 and plain.token_ids[3] not in later.token_ids[:10]


def test_bad_words_never_appear(tiny_llama):
    with LLM(str(tiny_llama), num_threads=1) as llm:
        encode = llm.engine.tokenizer.encode
        word = encode("the", add_special=False)
        bias = {token: 50.0 for token in word}
        assert "the" in first(llm, [5], logit_bias=bias, max_tokens=60).text
        output = first(llm, [5], logit_bias=bias, bad_words=("the",), max_tokens=60)
        assert all(output.token_ids[i : i + len(word)] != word for i in range(60))


def test_bans_of_everything_end_the_sequence_with_one_line(tiny_llama):
    with LLM(str(tiny_llama), num_threads=1) as llm:
        end = next(iter(llm.engine.tokenizer.end_ids))
        wanted = params(allowed_token_ids=(end,), min_tokens=2, ignore_eos=False)
        bad, good = llm.generate([[5, 6], [5, 6]], [wanted, params()])
        assert bad.outputs[0].finish_reason is FinishReason.ERROR and "bans" in bad.outputs[0].error
        assert good.outputs[0].token_ids == first(llm, [5, 6]).token_ids


def test_ids_outside_the_logits_are_refused_by_name(tiny_llama):
    with LLM(str(tiny_llama), num_threads=1) as llm:
        for fields in ({"logit_bias": {384: 1.0}}, {"stop_token_ids": (384,)}, {"allowed_token_ids": (5, 384)}):
            with pytest.raises(RequestError, match="384") as refusal:
                llm.generate([[5]], params(**fields))
            assert refusal.value.param == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"logit_bias": {5: 101.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {i: 0.0 for i in range(301)}},
        {"min_tokens": -1},
        {"min_tokens": 17, "max_tokens": 16},
        {"stop_token_ids": (True,)},
        {"allowed_token_ids": ()},
        {"bad_words": ("",)},
        {"bad_words": ("x",) * 65},
    ],
    ids=str,
)
def test_ranges(fields):
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**fields)
    assert refusal.value.param == next(iter(fields))
