"""The sampling oracle: known answers of the generator, filters against brute force, distribution, ties, broken rows."""

import math

import numpy as np
import pytest

from yeoul.exec.reference_sampling import choose, kept_ids, log_softmax, philox4x32, sample, token_logprob, uniform
from yeoul.step import RowStatus, SlotState

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(key, counter, words):
    """Known-answer vectors of the generator's authors (Random123)."""
    assert philox4x32(key, counter) == words


def test_uniform_is_the_top_53_bits():
    assert uniform(0, 0, 0) == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53
    assert uniform(2**64 - 1, 0, 0) == uniform(-1, 0, 0)


def test_uniform_depends_on_each_part():
    draws = {uniform(s, i, p) for s in (0, 1, 1 << 32) for i in (0, 1) for p in (0, 1, 2)}
    assert len(draws) == 18
    assert all(0 <= u < 1 for u in draws)


def state(**fields: object) -> SlotState:
    return SlotState(**{"seed": 1, "sequence_index": 0, "temperature": 1.0, **fields})


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 9e-6])
def test_low_temperature_is_greedy_and_ties_go_to_the_lowest_id(temperature: float):
    assert choose(f32(1, 3, 3, -1), state(temperature=temperature), 5) == 1


@pytest.mark.parametrize("temperature", [1.1e-5, 1e-4])
def test_temperature_above_the_threshold_does_not_overflow(temperature: float):
    tokens = {choose(f32(-300, 40, 39.9), state(temperature=temperature), p) for p in range(50)}
    assert tokens == {1}


def test_high_temperature_flattens():
    logits = f32(0, 10, 20, 30)
    counts = np.bincount([choose(logits, state(temperature=1e6), p) for p in range(4000)], minlength=4)
    assert counts.min() > 900


WEIGHTS = np.array([0.3, 1.0, 0.3, 0.05, 0.6, 0.0])


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": -1}, [0, 1, 2, 3, 4, 5]),
        ({"min_p": 0.3}, [0, 1, 2, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3}, [0, 1, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 1e-9}, [1]),
        # Of 2.25: 1.0 is 0.444, with 0.6 it is 0.711, with the first 0.3 it is 0.844.
        ({"top_p": 0.444}, [1]),
        ({"top_p": 0.445}, [1, 4]),
        ({"top_p": 0.72}, [0, 1, 4]),
        ({"top_p": 0.999999}, [0, 1, 2, 3, 4]),
        # top_p acts on what top_k left: of 1.6, 1.0 is 0.625.
        ({"top_k": 2, "top_p": 0.62}, [1]),
        ({"min_p": 0.5, "top_k": 5, "top_p": 0.63}, [1, 4]),
    ],
)
def test_filters(fields, kept):
    assert kept_ids(WEIGHTS, state(**fields)).tolist() == kept


def test_filters_by_brute_force():
    rng = np.random.default_rng(3)
    for _ in range(200):
        weights = np.round(rng.random(12), 1)
        weights[rng.integers(12)] = 1.0
        fields = {"min_p": rng.choice([0, 0.2]), "top_k": int(rng.integers(0, 8)), "top_p": rng.choice([0.3, 0.9, 1.0])}
        assert kept_ids(weights, state(**fields)).tolist() == _plain_filters(weights.tolist(), **fields)


def _plain_filters(weights: list[float], min_p: float, top_k: int, top_p: float) -> list[int]:
    left = [i for i, w in enumerate(weights) if w >= min_p]
    left.sort(key=lambda i: (-weights[i], i))
    left = left[:top_k] if top_k else left
    if top_p == 1:
        return sorted(left)
    total, out, running = 0.0, [], 0.0
    for i in left:
        total += weights[i]
    for i in left:
        out.append(i)
        running += weights[i]
        if running >= top_p * total:
            break
    return sorted(out)


def test_sampling_follows_the_distribution():
    logits = f32(*np.log([0.1, 0.2, 0.3, 0.4]))
    counts = np.bincount([choose(logits, state(seed=9), p) for p in range(8000)], minlength=4)
    # Four standard deviations of the largest binomial.
    assert np.abs(counts / 8000 - [0.1, 0.2, 0.3, 0.4]).max() < 4 * math.sqrt(0.24 / 8000)


def test_the_token_is_the_first_whose_running_sum_exceeds_the_draw():
    logits = f32(*np.log([0.25, 0.25, 0.5]))
    for position in range(100):
        u = uniform(1, 0, position)
        assert choose(logits, state(), position) == (0 if u < 0.25 - 1e-7 else 1 if u < 0.5 - 1e-7 else 2)


def test_masked_tokens_are_never_drawn():
    logits = f32(-math.inf, 0, -math.inf, 0, -math.inf)
    assert {choose(logits, state(), p) for p in range(200)} == {1, 3}


@pytest.mark.parametrize(
    "logits", [f32(0, math.nan), f32(-math.inf, -math.inf), f32(math.inf, 0), f32(math.nan, math.nan)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_have_a_status_and_no_token(logits: np.ndarray, temperature: float):
    result = sample(logits, state(temperature=temperature, num_logprobs=2), 0)
    assert (result.status, result.token_ids, result.logprobs) == (RowStatus.NAN, (), ())


def test_logprobs_are_of_the_raw_logits():
    logits = f32(1, 2, 2, 0)
    raw = np.log(np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum())
    result = sample(logits, state(temperature=0.0, num_logprobs=3), 0)
    assert result.token_ids == (1,)
    (entry,) = result.logprobs
    assert entry.token_id == 1
    assert entry.logprob == pytest.approx(raw[1], abs=1e-12)
    assert [token for token, _ in entry.top] == [1, 2, 0]
    assert [value for _, value in entry.top] == pytest.approx(raw[[1, 2, 0]], abs=1e-12)


def test_number_of_logprobs():
    logits = f32(1, 2, 3)
    assert sample(logits, state(), 0).logprobs == ()
    assert token_logprob(logits, 0, 0).top == ()
    assert len(token_logprob(logits, 0, 20).top) == 3


def test_log_softmax_of_large_logits():
    assert log_softmax(f32(10000, 10000)).tolist() == pytest.approx([math.log(0.5)] * 2)
