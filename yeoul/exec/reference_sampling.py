"""The sampling oracle: what a token is, given logits, parameters, seed, position and history. Float64 numpy, no state.

Owns the definition that every sampler of Yeoul follows; must not know plans, slots or models.

Random number: Philox4x32-10 (Salmon et al., 2011) with key (seed's low half, high half) and counter (position,
sequence index, 0, 0), where position is the place in the sequence of the token being sampled.

Token: temperature below 1e-5 is greedy, the lowest id on ties. Else each id has the weight exp((logit - max) /
temperature), and ids are dropped by min_p (weight below min_p), then top_k (all but the k heaviest, ties to the lowest
id), then top_p (all but the shortest prefix, heaviest first, that holds top_p of the weight left; at least one). The
token is the first id left, in ascending order, at which the running sum of weights exceeds u x their total.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from yeoul.exec.reference_rules import edit_logits
from yeoul.step import RowResult, RowStatus, SlotState
from yeoul.types import TokenLogprob

Array = np.ndarray
GREEDY_BELOW = 1e-5
MASK32 = 0xFFFFFFFF


def sample(logits: Array, state: SlotState, position: int, history: Sequence[int] = (), mask: bytes = b"") -> RowResult:
    """The token at `position` of the sequence, from float32 logits [vocab]; status NAN if they are broken.

    `history`: the tokens before it, where `state.rules` need them. `mask`: as in PlanRow. Log-probabilities are of
    `logits`, before any edit.
    """
    if not _is_sound(logits):
        return RowResult(status=RowStatus.NAN)
    edited = logits if state.rules is None else edit_logits(logits, state.rules, history, position)
    if mask:
        edited = np.where(allowed_ids(mask, len(logits)), edited, -np.inf)
    if not _is_sound(edited):
        return RowResult(status=RowStatus.NOTHING_ALLOWED)
    token = choose(edited, state, position)
    if state.num_logprobs < 0:
        return RowResult(token_ids=(token,))
    return RowResult(token_ids=(token,), logprobs=(token_logprob(logits, token, state.num_logprobs),))


def score(logits: Array, target: int, k: int) -> TokenLogprob | None:
    """Log-probabilities of `target` and of the k likeliest ids; None if the logits are broken."""
    return token_logprob(logits, target, k) if _is_sound(logits) else None


def allowed_ids(mask: bytes, vocab_size: int) -> Array:
    """A mask's bits as bool [vocab]."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return bits[:vocab_size].astype(bool)


def choose(logits: Array, state: SlotState, position: int) -> int:
    """The token for sound logits (no NaN, no +inf, something finite)."""
    wide = logits.astype(np.float64)
    if state.temperature < GREEDY_BELOW:
        return int(np.argmax(wide))
    weights = np.exp((wide - wide.max()) / state.temperature)
    kept = kept_ids(weights, state)
    sums = np.cumsum(weights[kept])
    drawn = np.searchsorted(sums, uniform(state.seed, state.sequence_index, position) * sums[-1], side="right")
    # u * total can round up to the total: then the last id that has any weight.
    last = np.searchsorted(sums, sums[-1], side="left")
    return int(kept[min(drawn, last)])


def kept_ids(weights: Array, state: SlotState) -> Array:
    """Ids that the filters leave, ascending."""
    ids = np.flatnonzero(weights >= state.min_p)
    # Heaviest first; a stable sort keeps ascending ids among equals.
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    if state.top_k > 0:
        ids = ids[: state.top_k]
    if state.top_p < 1:
        sums = np.cumsum(weights[ids])
        enough = np.searchsorted(sums, state.top_p * sums[-1], side="left")
        ids = ids[: enough + 1]
    return np.sort(ids)


def token_logprob(logits: Array, token: int, k: int) -> TokenLogprob:
    """Log-probabilities of the raw logits: the token's, and the k likeliest (descending, ties to the lowest id)."""
    logprobs = log_softmax(logits)
    best = np.argsort(-logprobs, kind="stable")[:k]
    return TokenLogprob(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


def log_softmax(logits: Array) -> Array:
    """Natural log-probabilities over the last axis, float64."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def uniform(seed: int, sequence_index: int, position: int) -> float:
    """The random number of one token: a multiple of 2^-53 in [0, 1)."""
    x = philox4x32((seed & MASK32, seed >> 32 & MASK32), (position & MASK32, sequence_index & MASK32, 0, 0))
    return ((x[0] << 21) | (x[1] >> 11)) * 2.0**-53


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with 10 rounds: four 32-bit words, a keyed bijection of the counter."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ k0, high & MASK32, low >> 32 ^ c3 ^ k1, low & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def _is_sound(logits: Array) -> bool:
    """Not all -inf, and no NaN or +inf: the maximum is finite."""
    return bool(np.isfinite(logits.max()))
