"""KV sizing: how many blocks every KV group gets, as pure arithmetic. The engine and `yeoul plan` both call it.

Owns the sums and the words that explain them. Must not read the machine, the environment or a file: the caller says how
much memory there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from yeoul.errors import ConfigError
from yeoul.types import KVKind, KVSpec

MEMORY_SHARE = 0.25
"""Part of the free memory that the KV pool may take when no flag says otherwise."""


class KVGroup(msgspec.Struct, frozen=True):
    """One KV group as sizing sees it: what a layer stores and how many layers store it."""

    spec: KVSpec
    num_layers: int


class KVRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the KV pool. 0 means "choose" in the last four fields but `available`."""

    groups: tuple[KVGroup, ...]
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    model_context: int
    """Longest sequence that the model was made for."""
    available: int
    """Bytes that are free once the weights are loaded."""
    max_model_len: int = 0
    kv_cache_memory: int = 0
    """Bytes."""
    num_kv_blocks: int = 0
    """Blocks of each full-attention pool, the null block included."""


class KVSizing(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Tuples are in group order; blocks include the null block."""

    num_blocks: tuple[int, ...]
    block_bytes: tuple[int, ...]
    """Bytes of one block of the group: all its layers, block_size tokens."""
    total_bytes: int
    max_model_len: int
    num_tokens: int
    """Tokens that fit in the smallest full pool (without one: in the smallest pool)."""
    lines: tuple[str, ...]
    """One line per number, each naming the flag that changes it."""


def token_bytes(spec: KVSpec) -> int:
    """Bytes of one token in one layer, scales included. Raises ConfigError for a dtype without a known size."""
    try:
        return spec.token_bytes()
    except ValueError as error:
        raise ConfigError(str(error), param="kv_cache_dtype") from error


def block_bytes(group: KVGroup, block_size: int) -> int:
    """Bytes of one block: all layers of the group."""
    return token_bytes(group.spec) * group.num_layers * block_size


def size_kv(request: KVRequest) -> KVSizing:
    """Choose the blocks of every group and the longest sequence.

    Window groups get what max_num_seqs sequences can use, but at most half of the budget; full groups get the rest, up
    to max_num_seqs sequences of the longest kind. Raises ConfigError, naming the flag, if not even one sequence fits.
    """
    wanted = _wanted_length(request)
    budget, why = _budget(request)
    num_blocks = _blocks_per_group(request, wanted, budget)
    sizes = tuple(block_bytes(group, request.block_size) for group in request.groups)
    num_tokens = _pool_tokens(request, num_blocks)
    length = min(wanted, num_tokens) if _full(request) else wanted
    total = sum(count * size for count, size in zip(num_blocks, sizes, strict=True))
    return KVSizing(
        num_blocks=num_blocks,
        block_bytes=sizes,
        total_bytes=total,
        max_model_len=length,
        num_tokens=num_tokens,
        lines=(
            f"kv cache: {_human(total)}; the limit is {why}",
            *_group_lines(request, num_blocks, sizes),
            _length_line(request, wanted, length),
            f"max_num_seqs: {request.max_num_seqs} (--max-num-seqs), "
            f"max_num_batched_tokens: {request.max_num_batched_tokens} (--max-num-batched-tokens)",
        ),
    )


def _wanted_length(request: KVRequest) -> int:
    if request.max_model_len > request.model_context:
        raise ConfigError(
            f"max_model_len is {request.max_model_len}; the model's context is {request.model_context}",
            hint="choose a smaller --max-model-len",
            param="max_model_len",
        )
    return request.max_model_len or request.model_context


def _budget(request: KVRequest) -> tuple[int | None, str]:
    """Bytes, and where they come from. None: --num-kv-blocks decides."""
    if request.num_kv_blocks:
        if not _full(request):
            raise ConfigError("num_kv_blocks sizes full-attention pools; this model has none", param="num_kv_blocks")
        return None, f"{request.num_kv_blocks} blocks (--num-kv-blocks)"
    if request.kv_cache_memory:
        return request.kv_cache_memory, f"{_human(request.kv_cache_memory)} (--kv-cache-memory)"
    share = int(request.available * MEMORY_SHARE)
    return share, f"{MEMORY_SHARE:.0%} of {_human(request.available)} of free memory (--kv-cache-memory)"


def _blocks_per_group(request: KVRequest, wanted: int, budget: int | None) -> tuple[int, ...]:
    windows = _window_blocks(request, wanted, budget)
    taken = sum(count * block_bytes(request.groups[group], request.block_size) for group, count in windows.items())
    full = _full_blocks(request, wanted, None if budget is None else budget - taken)
    return tuple(windows.get(group, full) for group in range(len(request.groups)))


def _window_blocks(request: KVRequest, wanted: int, budget: int | None) -> dict[int, int]:
    """Blocks of each window group: the most that can ever be used, shrunk alike if that is over half of the budget."""
    least, most = {}, {}
    for index, group in enumerate(request.groups):
        if group.spec.kind is KVKind.WINDOW:
            least[index], most[index] = _window_range(request, wanted, group.spec.window)
    share = _share_of_windows(request, most, budget)
    blocks = {index: max(least[index], int(most[index] * share)) for index in most}
    if budget is not None and _bytes_of(request, blocks) > budget:
        raise _too_small(request, _bytes_of(request, least), budget)
    return blocks


def _window_range(request: KVRequest, wanted: int, window: int) -> tuple[int, int]:
    """(least, most) blocks: one sequence that computes a whole step; all sequences and the chunks of one step."""
    size = request.block_size
    longest = _ceil(wanted, size)
    chunk = _ceil(request.max_num_batched_tokens, size)
    held = _ceil(window, size) + 1
    least = min(held + chunk, longest)
    most = min(request.max_num_seqs * held + chunk, request.max_num_seqs * longest)
    return least + 1, max(least, most) + 1


def _share_of_windows(request: KVRequest, most: dict[int, int], budget: int | None) -> float:
    if budget is None or not most:
        return 1.0
    allowed = budget / 2 if _full(request) else budget
    return min(1.0, allowed / _bytes_of(request, most))


def _full_blocks(request: KVRequest, wanted: int, budget: int | None) -> int:
    """Blocks of every full group: they hold the same tokens, so they get the same number."""
    if budget is None:
        if request.num_kv_blocks < 2:
            raise ConfigError("num_kv_blocks must be at least 2: block 0 is not usable", param="num_kv_blocks")
        return request.num_kv_blocks
    per_block = sum(block_bytes(group, request.block_size) for group in _full(request))
    if not per_block:
        return 0
    if budget < 2 * per_block:
        raise _too_small(request, 2 * per_block, budget)
    return min(budget // per_block, request.max_num_seqs * _ceil(wanted, request.block_size) + 1)


def _pool_tokens(request: KVRequest, num_blocks: tuple[int, ...]) -> int:
    kinds = [group.spec.kind for group in request.groups]
    pools = [count for count, kind in zip(num_blocks, kinds, strict=True) if kind is KVKind.FULL] or num_blocks
    return (min(pools) - 1) * request.block_size


def _full(request: KVRequest) -> list[KVGroup]:
    return [group for group in request.groups if group.spec.kind is KVKind.FULL]


def _bytes_of(request: KVRequest, blocks: dict[int, int]) -> int:
    return sum(count * block_bytes(request.groups[index], request.block_size) for index, count in blocks.items())


def _too_small(request: KVRequest, needed: int, budget: int) -> ConfigError:
    return ConfigError(
        f"the KV pool of {_human(budget)} is too small: one sequence needs {_human(needed)} to start",
        hint="raise --kv-cache-memory, or lower --max-num-batched-tokens or --max-model-len",
        param="kv_cache_memory",
    )


def _group_lines(request: KVRequest, num_blocks: Sequence[int], sizes: Sequence[int]) -> list[str]:
    return [
        f"kv group {index}: {_kind(group.spec)}, {group.num_layers} layers, {count - 1} blocks of {_human(size)} "
        f"= {(count - 1) * request.block_size} tokens ({_flag(group.spec)})"
        for index, (group, count, size) in enumerate(zip(request.groups, num_blocks, sizes, strict=True))
    ]


def _kind(spec: KVSpec) -> str:
    kind = "full attention" if spec.kind is KVKind.FULL else f"window of {spec.window}"
    return f"{kind}, {spec.k_dtype}" if spec.k_dtype == spec.v_dtype else f"{kind}, {spec.k_dtype}/{spec.v_dtype}"


def _flag(spec: KVSpec) -> str:
    return "--kv-cache-memory, --kv-cache-dtype, --v-cache-dtype" if spec.kind is KVKind.FULL else "--max-num-seqs"


def _length_line(request: KVRequest, wanted: int, length: int) -> str:
    if length < wanted:
        why = f"capped by the KV pool, {wanted} wanted (--kv-cache-memory)"
    elif request.max_model_len:
        why = "--max-model-len"
    else:
        why = "the model's own context (--max-model-len)"
    return f"max_model_len: {length}, {why}"


def _human(size: int) -> str:
    value, units = float(size), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if value < 1024 or unit == units[-1]:
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def _ceil(value: int, size: int) -> int:
    return -(-value // size)
