"""Outputs of the prompt's own positions: scores and pooled states, against logits and hidden states of the oracle."""

import numpy as np
import pytest

from yeoul.config import EngineConfig
from yeoul.engine.build import build_engine
from yeoul.engine.llm import LLM
from yeoul.errors import EngineError, RequestError
from yeoul.exec.native import NativeExecutor
from yeoul.exec.protocol import ExecutorLimits
from yeoul.exec.reference import ReferenceExecutor
from yeoul.exec.reference_sampling import log_softmax
from yeoul.models.registry import load_model
from yeoul.step import PlanRow, RowStatus, SlotState, StepPlan
from yeoul.types import FinishReason, Pooling, Request, SamplingParams
from yeoul.weights.gguf import GGUFFile

TOKENS = np.random.default_rng(4).integers(0, 384, 70).tolist()
STATE = SlotState(seed=1, sequence_index=0, num_score_logprobs=2)
LIMITS = dict(max_num_seqs=4, max_num_batched_tokens=128, max_model_len=256, block_size=16)


def executors(path):
    model = load_model(GGUFFile.open(path))
    limits = ExecutorLimits(num_blocks=(24,) * len(model.program.kv_groups), **LIMITS)
    return model, [NativeExecutor(model, limits, num_threads=2), ReferenceExecutor(model, limits, "as_native")]


def row(model, start, count, *, slot=0, **wants):
    blocks = tuple(range(1 + 6 * slot, 7 + 6 * slot)) if start == 0 else ()
    state = STATE if start == 0 else None
    tokens = tuple(TOKENS[start : start + count])
    return PlanRow(slot, start, count, tokens, (blocks,) * len(model.program.kv_groups), False, state, **wants)


def run(executor, *rows):
    return executor.collect(executor.submit(StepPlan(0, rows))).rows


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_scores_are_log_softmax_at_the_targets(tiny_paths, family):
    model, (native, reference) = executors(tiny_paths[family])
    for executor in (native, reference):
        expected = log_softmax(executor.logits(StepPlan(0, (row(model, 0, 70),))))
        (result,) = run(executor, row(model, 0, 70, score_first=3, score_targets=tuple(TOKENS[4:70])))
        assert [entry.token_id for entry in result.scores] == TOKENS[4:70]
        values = [entry.logprob for entry in result.scores]
        assert np.abs(values - expected[np.arange(3, 69), TOKENS[4:70]]).max() < 1e-5
        for entry, logprobs in zip(result.scores, expected[3:], strict=False):
            best = np.argsort(-logprobs, kind="stable")[:2].tolist()
            assert [token for token, _ in entry.top] == best


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_native_scores_and_sums_do_not_depend_on_chunks_or_neighbours(tiny_paths, family):
    model, (native, _) = executors(tiny_paths[family])
    whole = dict(score_targets=tuple(TOKENS[1:70]), num_pooled=0)
    (scored,) = run(native, row(model, 0, 70, **whole))
    (pooled,) = run(native, row(model, 0, 70, num_pooled=70))
    scores, start = [], 0
    for count in (7, 1, 30, 32):
        targets = tuple(TOKENS[start + 1 : start + count + 1][: 69 - start])
        mine = row(model, start, count, score_targets=targets)
        other = row(model, start, count, slot=1, num_pooled=count)
        first, second = run(native, mine, other)
        scores += first.scores
        start += count
    assert tuple(scores) == scored.scores and second.pooled == pooled.pooled


def test_pooled_states_are_near_the_oracles_and_last_is_one_token(tiny_llama):
    model, (native, reference) = executors(tiny_llama)
    found = [np.frombuffer(run(e, row(model, 0, 20, num_pooled=20))[0].pooled, "<f8") for e in (native, reference)]
    cosine = found[0] @ found[1] / np.linalg.norm(found[0]) / np.linalg.norm(found[1])
    assert found[0].shape == (64,) and cosine > 0.999
    (mean,) = run(native, row(model, 0, 20, num_pooled=20))
    (last,) = run(native, row(model, 0, 20, num_pooled=1))
    (before,) = run(native, row(model, 0, 19, num_pooled=19))
    sums = [np.frombuffer(result.pooled, "<f8") for result in (mean, last, before)]
    assert np.allclose(sums[0], sums[1] + sums[2], rtol=0, atol=1e-9)


def test_outputs_of_tokens_that_a_row_does_not_have_are_refused(tiny_llama):
    model, both = executors(tiny_llama)
    for executor in both:
        for wants in (dict(score_targets=(1,) * 6), dict(score_first=5, score_targets=(1,)), dict(num_pooled=6)):
            with pytest.raises(EngineError, match="does not have"):
                run(executor, row(model, 0, 5, **wants))
        (result,) = run(executor, row(model, 0, 5, score_targets=(1,)))
        assert result.status is RowStatus.OK


def test_a_score_target_outside_the_vocabulary_never_reaches_memory(tiny_llama):
    model, (native, _) = executors(tiny_llama)
    for target in (-1, 384, 2**30):
        (result,) = run(native, row(model, 0, 5, score_targets=(target,)))
        assert result.status is RowStatus.NAN


def params(**fields):
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **fields})


def test_prompt_logprobs_in_whole_engines_whatever_chunks_and_preemption_do(tiny_llama):
    """The first one grows while the second's prompt is computed, which is therefore preempted in the middle of it."""
    prompts = [TOKENS[:20], TOKENS[:40], TOKENS[:3], TOKENS[:1]]
    each = [params(max_tokens=45), params(max_tokens=12, prompt_logprobs=2)]
    each += [params(max_tokens=0, prompt_logprobs=0), params(max_tokens=0, prompt_logprobs=1)]
    with LLM(str(tiny_llama), num_threads=2, seed=1) as llm:
        solo = [llm.generate([prompt], own)[0] for prompt, own in zip(prompts, each, strict=True)]
        assert [len(one.prompt_logprobs) for one in solo] == [0, 39, 2, 0]
        assert solo[2].outputs[0].finish_reason is FinishReason.LENGTH and solo[2].outputs[0].token_ids == []
        plain = llm.generate([prompts[1]], params(max_tokens=12))[0]
        assert plain.outputs[0].token_ids == solo[1].outputs[0].token_ids
    with LLM(str(tiny_llama), num_threads=2, seed=1, num_kv_blocks=6, max_num_batched_tokens=3) as llm:
        together = llm.generate(prompts, each)
        assert llm.engine.stats().preemptions > 0
    for one, other in zip(together, solo, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def embed(engine, name, prompt, pooling, others=()):
    asked = [Request(request_id=name, prompt_token_ids=prompt, params=params(max_tokens=0), pooling=pooling), *others]
    for request in asked:
        engine.add(request)
    found = {}
    while engine.has_work:
        for output in engine.step().outputs:
            if output.pooled:
                found[output.request_id] = output.pooled
    return found[name]


def test_embeddings_do_not_depend_on_neighbours_or_chunks(tiny_llama):
    def engine(**options):
        return build_engine(EngineConfig(model=str(tiny_llama), num_threads=2, seed=1, **options))

    solo = {pooling: embed(engine(), "a", TOKENS[:50], pooling) for pooling in Pooling}
    assert solo[Pooling.LAST] != solo[Pooling.MEAN]
    for pooling in Pooling:
        others = [Request(request_id="b", prompt_token_ids=TOKENS[5:40], params=params(max_tokens=20))]
        busy = engine(num_kv_blocks=6, max_num_batched_tokens=16)
        assert embed(busy, "a", TOKENS[:50], pooling, others) == solo[pooling]
    with pytest.raises(RequestError, match="max_tokens 0"):
        engine().check(Request(request_id="a", prompt_token_ids=[1], params=params(), pooling=Pooling.LAST))
