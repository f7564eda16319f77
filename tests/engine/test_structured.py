"""Structured output in whole engines: replies have their form, neighbours do not notice, faults stay with one."""

import json
import re

import pytest

from yeoul.engine.llm import LLM
from yeoul.errors import RequestError
from yeoul.types import FinishReason, SamplingParams, Structured, StructuredKind

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["the fox", "the dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = {
    "json": Structured(StructuredKind.JSON, json.dumps(SCHEMA)),
    "regex": Structured(StructuredKind.REGEX, "(the|a) [a-z]{3,9} [0-9]{1,2}\\."),
    "choice": Structured(StructuredKind.CHOICE, '["river", "the \\"stream\\"", "sea"]'),
    "grammar": Structured(StructuredKind.GRAMMAR, 'start: "<" /[a-f]{2,6}/ ">"'),
}


def params(**fields):
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 80, **fields})


def check(kind, text):
    if kind == "json":
        value = json.loads(text)
        assert set(value) == {"name", "age"} and value["name"] in ("the fox", "the dog") and 0 <= value["age"] <= 99
    else:
        patterns = {"regex": FORMS["regex"].source, "choice": 'river|the "stream"|sea', "grammar": "<[a-f]{2,6}>"}
        assert re.fullmatch(patterns[kind], text), text


def replies(llm, each):
    prompts = [[5 + i, 6, 7] for i in range(len(each))]
    outputs = llm.generate(prompts, each)
    return [
        [(one.text, tuple(one.token_ids), tuple(one.logprobs), one.finish_reason) for one in o.outputs] for o in outputs
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_forms_hold_and_structured_and_plain_requests_do_not_disturb_each_other(tiny_paths, family):
    each = [params(structured=form, n=2, logprobs=1) for form in FORMS.values()]
    each += [params(ignore_eos=True, max_tokens=40), params(temperature=0.0, max_tokens=40, logprobs=2)]
    each += [params(structured=FORMS["regex"], ignore_eos=True, repetition_penalty=1.3)]
    with LLM(str(tiny_paths[family]), num_threads=2, seed=1) as llm:
        together = replies(llm, each)
        for kind, outputs in zip(FORMS, together, strict=False):
            for text, _, _, reason in outputs:
                check(kind, text)
                assert reason is FinishReason.STOP
        check("regex", together[-1][0][0])
        solo = [llm.generate([[5 + i, 6, 7]], own)[0].outputs for i, own in enumerate(each)]
        assert [[(o.text, tuple(o.token_ids)) for o in one] for one in solo] == [
            [o[:2] for o in one] for one in together
        ]
    with LLM(str(tiny_paths[family]), num_threads=2, seed=1, num_kv_blocks=8, max_num_batched_tokens=8) as llm:
        assert replies(llm, each) == together
        assert llm.engine.stats().preemptions > 0


def test_the_oracle_takes_masks_too(tiny_llama):
    with LLM(str(tiny_llama), executor="reference") as llm:
        check("json", llm.generate([[5, 6]], params(structured=FORMS["json"]))[0].outputs[0].text)


def test_bad_grammars_are_refused_before_anything_runs(tiny_llama):
    with LLM(str(tiny_llama), num_threads=1) as llm:
        bad = params(structured=Structured(StructuredKind.REGEX, "("))
        with pytest.raises(RequestError, match="unclosed group"):
            llm.generate([[5], [6]], [params(), bad])
        assert not llm.engine.has_work
        with pytest.raises(RequestError, match="min_tokens"):
            params(structured=FORMS["json"], min_tokens=3)


@pytest.mark.parametrize("method", ["mask", "advance"])
def test_a_grammar_that_fails_ends_its_own_request_only(tiny_llama, monkeypatch, method):
    with LLM(str(tiny_llama), num_threads=1) as llm:
        expected = llm.generate([[6]], params(structured=FORMS["regex"]))[0].outputs[0]
        start, calls = llm.engine.grammars.start, []

        def spoiled(structured):
            grammar = start(structured)
            if structured is FORMS["json"]:

                def fail(*arguments):
                    calls.append(method)
                    if len(calls) == 3:
                        raise RuntimeError("injected")
                    return original(*arguments)

                original = getattr(grammar, method)
                monkeypatch.setattr(grammar, method, fail)
            return grammar

        monkeypatch.setattr(llm.engine.grammars, "start", spoiled)
        bad, good = llm.generate([[5], [6]], [params(structured=FORMS["json"]), params(structured=FORMS["regex"])])
        assert bad.outputs[0].finish_reason is FinishReason.ERROR and "injected" not in bad.outputs[0].error
        assert good.outputs[0].token_ids == expected.token_ids
        llm.engine.check_books()
        assert llm.engine.stats().kv_used_blocks == 0
