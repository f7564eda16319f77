"""Room: what can never run in the pools that there are, and what makes room for it.

Must not know what waits or runs.
"""

from __future__ import annotations

from collections.abc import Callable

from yeoul.errors import ConfigError, ContextLengthError

RoomFor = Callable[[int], str | None]
"""The flags that make room for sequences of so many tokens; None where no flag does."""


def check_fits(num_prompt_tokens: int, max_model_len: int, room_for: RoomFor | None) -> None:
    """Raises ContextLengthError for a prompt that leaves no room for one token of output, even alone."""
    over = num_prompt_tokens + 1 - max_model_len
    if over <= 0:
        return
    flags = room_for(num_prompt_tokens + 1) if room_for is not None else None
    hint = f"shorten the prompt by {over} tokens"
    raise ContextLengthError(
        f"the prompt has {num_prompt_tokens} tokens; at most {max_model_len} fit, "
        "prompt and at least one token of output together",
        hint=f"{hint}, or start the engine with {flags}" if flags else hint,
        param="prompt",
    )


def check_window(max_chunk: int) -> None:
    """Raises ConfigError for pools in which a lone sequence can compute no token: `KVManager.max_chunk` < 1."""
    if max_chunk < 1:
        raise ConfigError(
            "the KV pool of a window group is smaller than its window",
            hint=f"give it room for {1 - max_chunk} more tokens",
            param="kv_cache_memory",
        )
