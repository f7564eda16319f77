"""Edited logits: the oracle against values computed by hand, the native form against the oracle, bit for bit."""

import numpy as np
import pytest

from yeoul.errors import EngineError
from yeoul.exec.native_outputs import logit_rules
from yeoul.exec.reference_rules import edit_logits
from yeoul.exec.reference_sampling import allowed_ids, sample
from yeoul.step import LogitRules, RowStatus, SlotState

VOCAB = 40


def f32(*values):
    return np.array(values, np.float32)


def test_p5_presence_and_frequency_count_generated_tokens_only():
    """`a` (id 0, in the prompt) leads `b` by 0.5; only once it was generated does the penalty move it."""
    logits = f32(1.0, 0.5, -3.0)
    presence = LogitRules(presence_penalty=1.0, num_prompt_tokens=1, history=(0,))
    assert edit_logits(logits, presence, [0], 1).tolist() == [1.0, 0.5, -3.0]
    assert edit_logits(logits, presence, [0, 0], 2).tolist() == [0.0, 0.5, -3.0]
    frequency = LogitRules(frequency_penalty=0.25, num_prompt_tokens=1)
    assert edit_logits(logits, frequency, [0, 0, 0, 0], 4).tolist() == [0.25, 0.5, -3.0]
    both = LogitRules(frequency_penalty=0.25, presence_penalty=0.5, num_prompt_tokens=1)
    assert edit_logits(logits, both, [0, 2, 2], 3).tolist() == [1.0, 0.5, -4.0]


def test_p5_repetition_is_the_hugging_face_definition():
    """score < 0: score x penalty, else score / penalty, for the ids of prompt and output, however often they occur."""
    rng = np.random.default_rng(1)
    for penalty in (2.0, 0.5, 1.3):
        logits = rng.normal(0, 3, VOCAB).astype(np.float32)
        history = rng.integers(0, VOCAB, 30).tolist()
        expected = logits.astype(np.float64)
        for token in range(VOCAB):
            if token in history:
                score = expected[token]
                expected[token] = score * penalty if score < 0 else score / penalty
        rules = LogitRules(repetition_penalty=penalty, num_prompt_tokens=10)
        assert edit_logits(logits, rules, history, 30).tolist() == expected.astype(np.float32).tolist()
    plain = edit_logits(f32(2, -1, 2, -1), LogitRules(repetition_penalty=2.0, num_prompt_tokens=2), [0, 1, 1, 1], 4)
    assert plain.tolist() == [1, -2, 2, -1]


def test_bias_is_added_after_penalties_and_bans_win():
    rules = LogitRules(repetition_penalty=2.0, bias=((0, 1.5), (1, 100.0)), end_ids=(1,), first_end=5)
    assert edit_logits(f32(2, 0, 0), rules, [0], 4).tolist() == [2.5, -np.inf, 0]
    assert edit_logits(f32(2, 0, 0), rules, [0], 5).tolist() == [2.5, 100, 0]


def test_bad_words_are_banned_where_their_beginning_was_generated():
    rules = LogitRules(bad_words=((7,), (1, 2), (3, 3, 4)), num_prompt_tokens=2)

    def banned(*output):
        edited = edit_logits(np.zeros(9, np.float32), rules, [1, 1, *output], 0)
        return np.flatnonzero(np.isinf(edited)).tolist()

    assert banned() == banned(2) == banned(3) == [7], "the prompt's own 1 does not count"
    assert banned(5, 1) == [2, 7]
    assert banned(3, 3) == banned(3, 3, 3) == [4, 7]


def test_allowed_tokens_are_the_only_ones_left():
    edited = edit_logits(f32(5, 4, 3, 2), LogitRules(allowed=(3, 1)), [], 0)
    assert np.flatnonzero(np.isfinite(edited)).tolist() == [1, 3]


def random_rules(rng):
    def ids(count):
        return tuple(rng.integers(0, VOCAB, count).tolist())

    return LogitRules(
        repetition_penalty=float(rng.choice([1.0, 1.1, 2.0, 0.7])),
        frequency_penalty=float(rng.choice([0.0, 0.3, -1.7])),
        presence_penalty=float(rng.choice([0.0, 0.9, -0.2])),
        bias=tuple((token, float(rng.normal() * 5)) for token in ids(rng.integers(0, 4))),
        end_ids=ids(rng.integers(0, 3)),
        first_end=int(rng.integers(0, 40)),
        bad_words=tuple(ids(rng.integers(1, 3)) for _ in range(rng.integers(0, 6))),
        allowed=None if rng.random() < 0.6 else ids(20),
        num_prompt_tokens=int(rng.integers(0, 10)),
        history=ids(10 + rng.integers(0, 15)),
    )


def test_native_edits_equal_the_oracles_bit_for_bit():
    rng = np.random.default_rng(2)
    for _ in range(300):
        rules, logits = random_rules(rng), (rng.normal(0, 4, VOCAB)).astype(np.float32)
        native, history = logit_rules(rules, VOCAB), list(rules.history)
        for position in range(len(history), len(history) + 6):
            expected = edit_logits(logits, rules, history, position)
            assert native.apply(logits, position).tobytes() == expected.tobytes()
            token = int(rng.integers(0, VOCAB))
            native.append(token)
            history.append(token)


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31 - 1])
@pytest.mark.parametrize("field", ["bias", "end_ids", "bad_words", "allowed", "history"])
def test_native_refuses_ids_outside_the_vocabulary(bad, field):
    values = {"bias": ((bad, 1.0),), "bad_words": ((0, bad),)}
    with pytest.raises(EngineError, match="outside the vocabulary"):
        logit_rules(LogitRules(**{field: values.get(field, (bad,))}), VOCAB)
    native = logit_rules(LogitRules(), VOCAB)
    with pytest.raises(ValueError, match="outside"):
        native.append(bad)
    with pytest.raises(ValueError, match="fit"):
        native.apply(np.zeros(VOCAB + 1, np.float32), 0)


def test_bans_of_everything_have_a_status_and_masks_are_bits():
    state = SlotState(
        seed=1, sequence_index=0, num_logprobs=1, rules=LogitRules(allowed=(1,), end_ids=(1,), first_end=9)
    )
    assert sample(f32(0, 1), state, 5).status is RowStatus.NOTHING_ALLOWED
    result = sample(f32(0, 1), state, 9)
    assert result.token_ids == (1,)
    assert result.logprobs[0].logprob == pytest.approx(np.log(1 / (1 + np.exp(-1)))), "of the unmodified distribution"
    mask = np.array([0b1010, 1], "<u4").tobytes()
    assert np.flatnonzero(allowed_ids(mask, 40)).tolist() == [1, 3, 32]
    plain = SlotState(seed=1, sequence_index=0)
    assert sample(np.arange(40, dtype=np.float32), plain, 0, (), mask).token_ids == (32,)
    assert sample(np.arange(3, dtype=np.float32), plain, 0, (), b"\0" * 4).status is RowStatus.NOTHING_ALLOWED
