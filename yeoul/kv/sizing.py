"""KV sizing: how many blocks every KV group gets, as pure arithmetic. The engine and `yeoul plan` both call it.

Owns the sums and the words that explain them. Must not read the machine, the environment or a file: the caller says how
much memory there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from yeoul.errors import ConfigError
from yeoul.types import KV_DTYPES, KVKind, KVSpec

MEMORY_SHARE = 0.25
"""Part of the free memory that the KV pool may take when no flag says otherwise."""
MIB = 1 << 20
MOST_MIB = 1 << 30
"""A budget beyond every use: where searches for the least one that works begin."""


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


def token_formula(group: KVGroup) -> str:
    """How the bytes of one token in all layers of the group come about, with the numbers put in."""
    spec = group.spec
    k, v = _head_formula(spec.key_size, spec.k_dtype), _head_formula(spec.value_size, spec.v_dtype)
    values = f"2 x {group.num_layers} layers x {spec.num_kv_heads} kv heads x {k}"
    if k != v:
        values = f"{group.num_layers} layers x {spec.num_kv_heads} kv heads x (K {k} + V {v})"
    return f"{values} = {token_bytes(spec) * group.num_layers} bytes"


def _head_formula(size: int, dtype: str) -> str:
    stored = KV_DTYPES[dtype]
    values = f"{size} x {stored.value_bytes} bytes"
    return f"({values} + {stored.scale_bytes} of scale)" if stored.scale_bytes else values


def size_kv(request: KVRequest) -> KVSizing:
    """Choose the blocks of every group and the longest sequence.

    Window groups get what max_num_seqs sequences can use, but at most half of the budget; full groups get the rest, up
    to max_num_seqs sequences of the longest kind. Raises ConfigError, naming the flag, if not even one sequence fits.
    """
    wanted = _wanted_length(request)
    budget, why = _budget(request)
    num_blocks = _blocks_per_group(request, wanted, budget)
    if num_blocks is None:
        raise _too_small(request, budget or 0)
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
            f"kv cache: {human(total)}; the limit is {why}{_over_memory(request, total)}",
            *_group_lines(request, num_blocks, sizes),
            _length_line(request, wanted, length),
            f"max_num_seqs: {request.max_num_seqs} (--max-num-seqs), "
            f"max_num_batched_tokens: {request.max_num_batched_tokens} (--max-num-batched-tokens)",
        ),
    )


def concurrent(request: KVRequest, num_blocks: Sequence[int], num_tokens: int) -> int:
    """Sequences of `num_tokens` tokens (prompt and output) that run to their end side by side, none preempted."""
    each = [
        _sequences_in(request, group.spec, count - 1, num_tokens)
        for group, count in zip(request.groups, num_blocks, strict=True)
    ]
    return min(request.max_num_seqs, *each)


def concurrent_formula(request: KVRequest, group: KVGroup, num_blocks: int, num_tokens: int) -> str:
    """How many sequences of `num_tokens` a pool of `num_blocks` holds side by side, with the numbers put in."""
    size, count = request.block_size, _sequences_in(request, group.spec, num_blocks - 1, num_tokens)
    whole = f"{num_blocks - 1} blocks / ({num_tokens} / {size}, rounded up)"
    if (num_blocks - 1) // _ceil(num_tokens, size) == count:
        return f"{whole} = {count}"
    chunk = f"({num_blocks - 1} blocks - {request.max_num_batched_tokens} / {size} of a step)"
    return f"{chunk} / ({group.spec.window} / {size} + 1) = {count}"


def least_memory(request: KVRequest, num_tokens: int, count: int = 1) -> int:
    """The least --kv-cache-memory, in whole MiB as bytes, that holds `count` sequences of `num_tokens` side by side.

    `count` is at most max_num_seqs, `num_tokens` at most the longest sequence that the request allows.
    """
    low, high = 0, MOST_MIB
    while high - low > 1:
        middle = (low + high) // 2
        blocks = _blocks_per_group(request, _wanted_length(request), middle * MIB)
        if blocks is not None and _holds(request, blocks, num_tokens, count):
            high = middle
        else:
            low = middle
    return high * MIB


def how_to_fit(request: KVRequest, num_tokens: int) -> str | None:
    """The flags, with their values, that make room for sequences of `num_tokens`; None: the model has no such context.

    `request` is the one that the engine was sized by.
    """
    if num_tokens > request.model_context:
        return None
    flags = []
    if num_tokens > (request.max_model_len or request.model_context):
        flags.append(f"--max-model-len {num_tokens}")
        request = msgspec.structs.replace(request, max_model_len=num_tokens)
    blocks = _blocks_per_group(request, num_tokens, _budget(request)[0])
    if blocks is None or not _holds(request, blocks, num_tokens, 1):
        flags.append(_pool_flag(request, num_tokens))
    return " and ".join(flags)


def _holds(request: KVRequest, num_blocks: Sequence[int], num_tokens: int, count: int) -> bool:
    room = _pool_tokens(request, num_blocks) if _full(request) else num_tokens
    return room >= num_tokens and concurrent(request, num_blocks, num_tokens) >= count


def _sequences_in(request: KVRequest, spec: KVSpec, capacity: int, num_tokens: int) -> int:
    """In a pool of `capacity` blocks. A window group holds windows and one step's chunks, as in `_window_range`."""
    whole = capacity // _ceil(num_tokens, request.block_size)
    if spec.kind is not KVKind.WINDOW:
        return whole
    chunk = _ceil(request.max_num_batched_tokens, request.block_size)
    return max(whole, (capacity - chunk) // (_ceil(spec.window, request.block_size) + 1))


def _pool_flag(request: KVRequest, num_tokens: int) -> str:
    """The flag, with its least value, that makes the pool hold one sequence of this length."""
    if request.num_kv_blocks:
        return f"--num-kv-blocks {_ceil(num_tokens, request.block_size) + 1}"
    return f"--kv-cache-memory {mebibytes(least_memory(request, num_tokens))}"


def _over_memory(request: KVRequest, total: int) -> str:
    if total <= request.available:
        return ""
    room = max(request.available, 0) // MIB * MIB
    return f". Only {human(room)} are free: memory may run out above --kv-cache-memory {mebibytes(room)}"


def _wanted_length(request: KVRequest) -> int:
    if request.max_model_len > request.model_context:
        raise ConfigError(
            f"max_model_len is {request.max_model_len}; the model's context is {request.model_context}",
            hint=f"choose --max-model-len {request.model_context} or less",
            param="max_model_len",
        )
    return request.max_model_len or request.model_context


def _budget(request: KVRequest) -> tuple[int | None, str]:
    """Bytes, and where they come from. None: --num-kv-blocks decides."""
    if request.num_kv_blocks:
        if not _full(request):
            raise ConfigError(
                "num_kv_blocks sizes full-attention pools; this model has none",
                hint="use --kv-cache-memory",
                param="num_kv_blocks",
            )
        return None, f"{request.num_kv_blocks} blocks (--num-kv-blocks)"
    if request.kv_cache_memory:
        return request.kv_cache_memory, f"{human(request.kv_cache_memory)} (--kv-cache-memory)"
    share = int(request.available * MEMORY_SHARE)
    return share, f"{MEMORY_SHARE:.0%} of {human(request.available)} of free memory (--kv-cache-memory)"


def _blocks_per_group(request: KVRequest, wanted: int, budget: int | None) -> tuple[int, ...] | None:
    """None: not even one sequence can start."""
    windows = _window_blocks(request, wanted, budget)
    rest = None if budget is None else budget - _bytes_of(request, windows)
    full = _full_blocks(request, wanted, rest)
    if full is None or (rest is not None and rest < 0):
        return None
    return tuple(windows.get(group, full) for group in range(len(request.groups)))


def _window_blocks(request: KVRequest, wanted: int, budget: int | None) -> dict[int, int]:
    """Blocks of each window group: the most that can ever be used, shrunk alike if that is over half of the budget."""
    least, most = {}, {}
    for index, group in enumerate(request.groups):
        if group.spec.kind is KVKind.WINDOW:
            least[index], most[index] = _window_range(request, wanted, group.spec.window)
    share = _share_of_windows(request, most, budget)
    return {index: max(least[index], int(most[index] * share)) for index in most}


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


def _full_blocks(request: KVRequest, wanted: int, budget: int | None) -> int | None:
    """Blocks of every full group: they hold the same tokens, so they get the same number. None: fewer than two."""
    if budget is None:
        if request.num_kv_blocks < 2:
            raise ConfigError("num_kv_blocks must be at least 2: block 0 is not usable", param="num_kv_blocks")
        return request.num_kv_blocks
    per_block = sum(block_bytes(group, request.block_size) for group in _full(request))
    if not per_block:
        return 0
    if budget < 2 * per_block:
        return None
    return min(budget // per_block, request.max_num_seqs * _ceil(wanted, request.block_size) + 1)


def _pool_tokens(request: KVRequest, num_blocks: Sequence[int]) -> int:
    kinds = [group.spec.kind for group in request.groups]
    pools = [count for count, kind in zip(num_blocks, kinds, strict=True) if kind is KVKind.FULL] or num_blocks
    return (min(pools) - 1) * request.block_size


def _full(request: KVRequest) -> list[KVGroup]:
    return [group for group in request.groups if group.spec.kind is KVKind.FULL]


def _bytes_of(request: KVRequest, blocks: dict[int, int]) -> int:
    return sum(count * block_bytes(request.groups[index], request.block_size) for index, count in blocks.items())


def _too_small(request: KVRequest, budget: int) -> ConfigError:
    least, whole = least_memory(request, 1), least_memory(request, _wanted_length(request))
    return ConfigError(
        f"the KV pool of {human(budget)} is too small: one sequence needs {human(least)} to start",
        hint=f"give --kv-cache-memory {mebibytes(least)} or more; "
        f"{mebibytes(whole)} hold one sequence of {_wanted_length(request)} tokens",
        param="kv_cache_memory",
    )


def _group_lines(request: KVRequest, num_blocks: Sequence[int], sizes: Sequence[int]) -> list[str]:
    return [
        f"kv group {index}: {_kind(group.spec)}, {group.num_layers} layers, {count - 1} blocks of {human(size)} "
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
        why = f"capped by the KV pool, {wanted} wanted ({_pool_flag(request, wanted)})"
    elif request.max_model_len:
        why = "--max-model-len"
    else:
        why = "the model's own context (--max-model-len)"
    return f"max_model_len: {length}, {why}"


def human(size: int) -> str:
    """Bytes with one decimal in the fitting unit, for people."""
    value, units = float(size), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if round(value, 1) < 1024 or unit == units[-1]:
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def mebibytes(size: int) -> str:
    """Bytes, rounded up, as flags take them: `12MiB`."""
    return f"{_ceil(size, MIB)}MiB"


def _ceil(value: int, size: int) -> int:
    return -(-value // size)
