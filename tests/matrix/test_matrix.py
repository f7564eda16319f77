"""The matrix in short: `make matrix` runs a thousand mixes and writes docs/reference/techniques.md."""

from collections import Counter

import pytest
from mixes import OFF, Mix, Model, Solo, check_mix, compare, tiny

from yeoul.types import Request, SamplingParams
from yeoul.weights.catalogue import find_model


@pytest.fixture(scope="module")
def solo(tiny_gemma3):
    runs = Solo(tiny(tiny_gemma3))
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def smollm2():
    path = find_model("smollm2-135m")
    runs = Solo(Model(path, 49152, max_model_len=96, pools=(), prompts=(), outputs=(), num_requests=0))
    yield runs
    runs.close()


@pytest.mark.parametrize("first", range(0, 72, 6))
def test_no_technique_changes_a_bit_of_a_reply(solo, first):
    for seed in range(first, first + 6):
        check_mix(seed, solo)


@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("fp8_e4m3", "bf16"), ("f32", "fp8_e5m2")])
def test_blocks_of_any_dtype_are_shared_copied_and_swapped_with_their_scales(tiny_gemma3, dtypes):
    runs, total = Solo(tiny(tiny_gemma3, kv_cache_dtype=dtypes[0], v_cache_dtype=dtypes[1])), Counter()
    for seed in range(8):
        total += check_mix(seed, runs)[1].counters
    runs.close()
    for name in ("preemptions", "swapped_tokens", "forks", "prefix_cache_hits"):
        assert total[name] > 0, name


@pytest.mark.parametrize(
    "techniques",
    [
        {"enable_prefix_caching": True, "fork": True, "preemption_mode": "swap", "scheduling_policy": "priority"},
        {"enable_prefix_caching": True, "batching": "prefill_first", "preemption_victim": "lowest_priority"},
    ],
)
def test_no_technique_changes_a_bit_of_a_reply_of_smollm2(smollm2, techniques):
    prompt = range(1000, 1040)
    arrivals = []
    for number in range(4):
        params = SamplingParams(
            max_tokens=12, temperature=number % 2, seed=number, n=1 + number % 2, ignore_eos=True, logprobs=1
        )
        made = Request(request_id=f"r{number}", prompt_token_ids=[*prompt, number], params=params, priority=-number)
        arrivals.append((3 * number, made))
    mix = Mix({**OFF, "max_num_batched_tokens": 24, **techniques}, 7, 4, 60.0, arrivals, {})
    outcome = compare(mix, smollm2, "smollm2")
    assert outcome.counters["preemptions"] > 0 and outcome.counters["prefix_cache_hits"] > 0


def test_the_mixes_exercise_what_they_are_for(solo):
    total = Counter()
    for seed in range(12):
        total += check_mix(seed, solo)[1].counters
    for name in ("preemptions", "swapped_tokens", "lost_tokens", "forks", "prefix_cache_hits"):
        assert total[name] > 0, name
