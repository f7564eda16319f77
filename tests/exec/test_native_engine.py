"""The promise, end to end: requests batched and preempted get the tokens and log-probabilities of their solo runs."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from native_kit import pulled
from tiny import FAMILIES, K_SIZES, tiny_model

from yeoul.engine.llm import LLM, RequestOutput
from yeoul.types import SamplingParams


def random_requests(
    rng: random.Random, vocab: int, count: int, longest: int, most: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.choice([1, 2, 15, 16, 17, longest]))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, most),
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            min_p=rng.choice([0.0, 0.02]),
            seed=rng.randrange(1 << 40),
            n=rng.choice([1, 1, 1, 2]),
            logprobs=rng.choice([0, 3]),
            ignore_eos=rng.random() < 0.5,
        )
        for _ in range(count)
    ]
    return prompts, params


def replies(outputs: Sequence[RequestOutput]) -> list[list[tuple[object, ...]]]:
    return [[(o.text, o.token_ids, o.logprobs, o.finish_reason) for o in output.outputs] for output in outputs]


def assert_solo_equals_batch(
    path: Path, vocab: int, *, count: int, longest: int, most: int, kv_blocks: int, **options: object
) -> None:
    prompts, params = random_requests(random.Random(5), vocab, count, longest, most)
    sizes = {"max_model_len": 128, "seed": 1, **options}
    with LLM(
        str(path), num_kv_blocks=kv_blocks, max_num_seqs=24, max_num_batched_tokens=64, num_threads=3, **sizes
    ) as llm:
        together = replies(llm.generate(prompts, params))
        assert llm.engine.stats().preemptions > 0
        assert llm.engine.stats().kv_used_blocks == 0
    with LLM(str(path), max_num_seqs=8, max_num_batched_tokens=256, num_threads=1, **sizes) as llm:
        alone = [replies(llm.generate([prompt], own))[0] for prompt, own in zip(prompts, params, strict=True)]
        assert llm.engine.stats().preemptions == 0
    assert together == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family: str, tmp_path: Path):
    options = K_SIZES if family == "qwen2" else {}
    path = tiny_model(tmp_path, family, **options)
    assert_solo_equals_batch(path, 380, count=64, longest=50, most=24, kv_blocks=30)


def test_float32_cache(tmp_path: Path):
    path = tiny_model(tmp_path, "llama", weight_type="BF16", weight_types={})
    assert_solo_equals_batch(path, 380, count=24, longest=50, most=24, kv_blocks=20, kv_cache_dtype="f32")


def test_smollm2():
    path = pulled("smollm2-135m")
    assert_solo_equals_batch(path, 49152, count=16, longest=40, most=10, kv_blocks=9)


@pytest.mark.models
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "vocab"),
    [("smollm2-135m", 49152), ("gemma3-270m", 262144), ("qwen2.5-coder-0.5b", 151643), ("qwen2.5-coder-1.5b", 151643)],
)
def test_real_models(name: str, vocab: int):
    assert_solo_equals_batch(pulled(name), vocab, count=64, longest=50, most=16, kv_blocks=40)
