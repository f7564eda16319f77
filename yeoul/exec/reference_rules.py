"""The oracle for edited logits: what LogitRules mean, in numpy. No state.

Owns the definition of penalties, bias and bans that every executor follows; must not know plans, slots or models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from yeoul.step import LogitRules

Array = np.ndarray


def edit_logits(logits: Array, rules: LogitRules, history: Sequence[int], position: int) -> Array:
    """The logits to sample from, float32 [vocab], for the token at `position`.

    `history`: all tokens of the sequence before it, prompt and output. Raises IndexError for an id past the vocabulary.
    """
    edited = _penalize(logits.astype(np.float32), rules, history)
    for token_id, bias in rules.bias:
        edited[token_id] = np.float64(edited[token_id]) + bias
    edited[list(_banned(rules, history, position))] = -np.inf
    if rules.allowed is not None:
        kept = np.full_like(edited, -np.inf)
        allowed = list(rules.allowed)
        kept[allowed] = edited[allowed]
        return kept
    return edited


def _penalize(logits: Array, rules: LogitRules, history: Sequence[int]) -> Array:
    edited = logits.copy()
    if rules.repetition_penalty != 1:
        for token_id in set(history):
            value = np.float64(edited[token_id])
            edited[token_id] = value / rules.repetition_penalty if value > 0 else value * rules.repetition_penalty
    for token_id, count in Counter(history[rules.num_prompt_tokens :]).items():
        value = np.float64(edited[token_id])
        edited[token_id] = value - (rules.presence_penalty + rules.frequency_penalty * count)
    return edited


def _banned(rules: LogitRules, history: Sequence[int], position: int) -> Iterable[int]:
    if position < rules.first_end:
        yield from rules.end_ids
    output = tuple(history[rules.num_prompt_tokens :])
    for word in rules.bad_words:
        before = word[:-1]
        if not before or output[-len(before) :] == before:
            yield word[-1]
