"""The native sampler against the sampling oracle, over the way that a step takes: gather, logits, sample."""

import msgspec
import numpy as np
import pytest
from native_kit import ISA_LEVELS

from yeoul import _native
from yeoul.exec.native_outputs import NO_MASK, RESULT, SAMPLE, SAMPLING
from yeoul.exec.reference_sampling import choose, token_logprob, uniform
from yeoul.step import SlotState

VOCAB = 263


class Sampler:
    """A program that only samples: token i's embedding is row i of the logits, the output matrix is the identity."""

    def __init__(self, logits: np.ndarray, isa: str = "auto", threads: int = 2) -> None:
        rows, vocab = logits.shape
        self._pool = _native.Pool(threads)
        matrices = {"logits": logits, "identity": np.eye(vocab, dtype=np.float32)}
        arena = _native.WeightArena(sum(_native.packed_bytes(0, *m.shape) for m in matrices.values()))
        packed = {
            name: _native.pack(0, *m.shape, m.view(np.uint8).reshape(-1), arena, self._pool)
            for name, m in matrices.items()
        }
        stride = -(-4 * vocab // 64) * 64
        level = ISA_LEVELS[0] if isa == "auto" else isa
        self._program = _native.Program(self._pool, level, 2 * rows * stride, [])
        embedded, gathered = (0, stride, vocab, False), (rows * stride, stride, vocab, True)
        self._program.embed(packed["logits"], embedded)
        self._program.gather(embedded, gathered)
        self._program.logits(gathered, (0, 0, 0, False), packed["identity"])
        self._sampling, self._results = np.zeros(rows, SAMPLING), np.zeros(rows, RESULT)
        ids, plan = np.arange(rows, dtype=np.int32), np.zeros((rows, 4), np.int32)
        raw = self._sampling.view(np.uint8), self._results.view(np.uint8)
        outputs = np.tile(np.array([SAMPLE, 0, 0, NO_MASK], np.int32), (rows, 1))
        extra = outputs, np.zeros((1, -(-vocab // 32)), np.uint32), np.zeros((1, vocab))
        self._program.bind(ids, ids.copy(), plan, ids.copy(), *extra, *raw, np.zeros(rows, np.uint8))

    def __call__(self, states: list[SlotState], positions: list[int]) -> np.ndarray:
        for i, (state, position) in enumerate(zip(states, positions, strict=True)):
            values = state.temperature, state.top_p, state.min_p, max(state.top_k, 0), state.seed
            self._sampling[i] = (*values, state.sequence_index, position, state.num_logprobs)
        self._program.run(len(states), 0, len(states), len(states), None, 0, len(self._program))
        return self._results


def random_state(rng: np.random.Generator) -> SlotState:
    return SlotState(
        seed=int(rng.integers(0, 1 << 64, dtype=np.uint64)),
        sequence_index=int(rng.integers(8)),
        temperature=float(np.float32(rng.choice([0.0, 0.3, 0.8, 1.0, 2.5]))),
        top_p=float(np.float32(rng.choice([0.0, 0.1, 0.6, 0.95, 1.0, 1.0]))),
        top_k=int(rng.choice([-1, 0, 1, 2, 20, 400])),
        min_p=float(np.float32(rng.choice([0.0, 0.0, 0.02, 0.5]))),
        num_logprobs=int(rng.integers(-1, 21)),
    )


def near_border(logits: np.ndarray, state: SlotState, position: int, token: int) -> bool:
    """Would the oracle choose this token if a filter's border, or the draw, were moved a little?"""
    moved = [
        msgspec.structs.replace(
            state, top_p=state.top_p * (1 + a), min_p=state.min_p * (1 + b), temperature=state.temperature * (1 + c)
        )
        for a in (-1e-6, 0.0, 1e-6)
        for b in (-1e-6, 0.0, 1e-6)
        for c in (-1e-6, 0.0, 1e-6)
    ]
    return any(choose(logits, other, position) == token for other in moved)


@pytest.mark.parametrize("isa", ISA_LEVELS)
def test_tokens_and_logprobs_equal_the_oracle(isa: str):
    rng = np.random.default_rng(6)
    logits = (rng.standard_normal((60, VOCAB)) * rng.choice([0.1, 2, 8], (60, 1))).astype(np.float32)
    logits[::3] = np.round(logits[::3] * 4) / 4  # ties
    sampler, borders = Sampler(logits, isa), 0
    for _ in range(8):
        states = [random_state(rng) for _ in logits]
        positions = rng.integers(1, 5000, len(logits)).tolist()
        for row, state, position, result in zip(logits, states, positions, sampler(states, positions), strict=True):
            assert result["status"] == 0
            token = int(result["token"])
            if token != choose(row, state, position):
                borders += 1
                assert near_border(row, state, position, token), (state, position)
            if state.num_logprobs >= 0:
                expected = token_logprob(row, token, state.num_logprobs)
                assert result["logprob"] == pytest.approx(expected.logprob, abs=2e-5)
                assert result["top_ids"][: state.num_logprobs].tolist() == [i for i, _ in expected.top]
                values = [value for _, value in expected.top]
                assert result["top_logprobs"][: state.num_logprobs].tolist() == pytest.approx(values, abs=2e-5)
    assert borders < 6


def test_a_row_does_not_depend_on_its_neighbours_or_threads():
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((40, VOCAB)).astype(np.float32)
    states, positions = [random_state(rng) for _ in logits], list(range(40))
    together = Sampler(logits, threads=3)(states, positions).copy()
    for i in range(len(logits)):
        alone = Sampler(logits[i : i + 1], threads=1)([states[i]], [positions[i]])
        assert alone[0] == together[i]


def test_the_distribution_is_followed():
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4]], np.float32))
    sampler, counts = Sampler(logits), np.zeros(4)
    for position in range(8000):
        counts[sampler([SlotState(seed=9, sequence_index=0, temperature=1.0)], [position])[0]["token"]] += 1
    # Four standard deviations of the largest binomial.
    assert np.abs(counts / 8000 - [0.1, 0.2, 0.3, 0.4]).max() < 4 * np.sqrt(0.24 / 8000)


def test_alternatives_whose_probability_is_nothing_are_reported():
    """Weights below e^-87 are zero in float32; the tokens still have an order and a log-probability."""
    logits = np.array([[0.0, -200.0, -100.0, -300.0]], np.float32)
    result = Sampler(logits)([SlotState(seed=1, sequence_index=0, num_logprobs=4)], [1])[0]
    assert result["top_ids"][:4].tolist() == [0, 2, 1, 3]
    assert result["top_logprobs"][:4].tolist() == [0.0, -100.0, -200.0, -300.0]


def test_top_k_of_one_is_greedy_at_any_temperature():
    """At a high temperature all weights round to one float; the order must not."""
    logits = np.array([[1.0, 1.5, 1.25, 0.0]], np.float32)
    for position in range(20):
        state = SlotState(seed=1, sequence_index=0, temperature=1e6, top_k=1)
        assert Sampler(logits)([replace_state(state, position)], [position])[0]["token"] == 1


def replace_state(state: SlotState, seed: int) -> SlotState:
    return msgspec.structs.replace(state, seed=seed)


@pytest.mark.parametrize("top_k", [0, 3])
def test_top_p_of_zero_keeps_one_token(top_k: int):
    logits = np.array([[1.0, 3.0, 3.0, 0.0]], np.float32)
    states = [SlotState(seed=seed, sequence_index=0, temperature=1.0, top_p=0.0, top_k=top_k) for seed in range(20)]
    assert {int(Sampler(logits)([state], [4])[0]["token"]) for state in states} == {1}


def test_broken_logits_have_a_status():
    logits = np.zeros((3, 8), np.float32)
    logits[1, 4] = np.nan
    states = [SlotState(seed=1, sequence_index=0, temperature=1.0)] * 3
    assert Sampler(logits)(states, [1, 2, 3])["status"].tolist() == [0, 1, 0]


def test_uniform_equals_the_oracle():
    rng = np.random.default_rng(8)
    for _ in range(300):
        seed, index, position = (int(rng.integers(0, 1 << bits, dtype=np.uint64)) for bits in (63, 31, 31))
        assert _native.uniform(seed, index, position) == uniform(seed, index, position)
    assert _native.uniform(2**64 - 1, 0, 0) == uniform(2**64 - 1, 0, 0)
