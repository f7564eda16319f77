"""Allocation policies: how many blocks of a full-attention pool a sequence holds. Pure arithmetic.

`paged` takes blocks as tokens come; the others are what engines did before, kept to be compared with it: `reserve_max`
holds the longest sequence from the start, `reserve_exact` the prompt and all the tokens it may generate, `pow2` doubles
what it holds when it is full. Sliding-window groups are bounded by their window and stay paged under every policy.
"""

from __future__ import annotations


def blocks_to_hold(policy: str, needed: int, own_limit: int, longest: int) -> int:
    """Blocks that a sequence holds when it needs `needed` of them.

    `own_limit`: blocks of its prompt and max_tokens; `longest`: blocks of max_model_len. Never below `needed`.
    """
    if policy == "paged":
        return needed
    if policy == "reserve_max":
        return max(needed, longest)
    if policy == "reserve_exact":
        return max(needed, own_limit)
    return max(needed, min(longest, 1 << (needed - 1).bit_length()))
