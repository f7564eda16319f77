"""Sizing: the arithmetic by hand, the limits, and that every line names its flag."""

import msgspec
import pytest

from yeoul.errors import ConfigError
from yeoul.kv.manager import KVManager
from yeoul.kv.sizing import KVGroup, KVRequest, block_bytes, size_kv, token_bytes
from yeoul.types import KVKind, KVSpec

FULL = KVSpec(KVKind.FULL, 3, 64, 64)
WINDOW = KVSpec(KVKind.WINDOW, 1, 256, 256, window=512)
BASE = KVRequest(
    groups=(KVGroup(FULL, 30),),
    block_size=16,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    model_context=8192,
    available=8 << 30,
)
GEMMA = msgspec.structs.replace(
    BASE,
    groups=(KVGroup(WINDOW, 15), KVGroup(KVSpec(KVKind.FULL, 1, 256, 256), 3)),
    model_context=32768,
)


def changed(base: KVRequest, **fields: object) -> KVRequest:
    return msgspec.structs.replace(base, **fields)


def test_bytes():
    assert token_bytes(FULL) == 3 * (64 * 2 + 64 * 2)
    assert token_bytes(KVSpec(KVKind.FULL, 2, 8, 4, "f32", "f16")) == 2 * (8 * 4 + 4 * 2)
    assert token_bytes(KVSpec(KVKind.FULL, 3, 64, 32, "int8", "fp8_e4m3")) == 3 * (64 + 2 + 32)
    assert block_bytes(KVGroup(FULL, 30), 16) == 768 * 30 * 16
    with pytest.raises(ConfigError, match="'fp3'"):
        token_bytes(KVSpec(KVKind.FULL, 1, 8, 8, "fp3"))


@pytest.mark.parametrize(("dtype", "gain"), [("bf16", 1), ("int8", 1.93), ("fp8_e4m3", 2), ("fp8_e5m2", 2)])
def test_the_same_memory_holds_more_tokens_of_small_dtypes(dtype, gain):
    small = msgspec.structs.replace(FULL, k_dtype=dtype, v_dtype=dtype)
    tokens = [size_kv(changed(BASE, groups=(KVGroup(spec, 30),))).num_tokens for spec in (FULL, small)]
    assert gain * tokens[0] <= tokens[1] < (gain + 0.02) * tokens[0]


def test_a_quarter_of_the_free_memory_by_default():
    sizing = size_kv(BASE)
    assert sizing.num_blocks == ((2 << 30) // (768 * 30 * 16),)
    assert sizing.total_bytes <= 2 << 30
    assert sizing.total_bytes == sizing.num_blocks[0] * sizing.block_bytes[0]
    assert sizing.max_model_len == 8192
    assert sizing.num_tokens == (sizing.num_blocks[0] - 1) * 16


def test_never_more_than_all_sequences_at_full_length():
    assert size_kv(changed(BASE, available=1 << 40)).num_blocks == (64 * 8192 // 16 + 1,)
    assert size_kv(changed(BASE, kv_cache_memory=1 << 40, max_model_len=100)).num_blocks == (64 * 7 + 1,)


def test_the_pool_caps_max_model_len():
    sizing = size_kv(changed(BASE, num_kv_blocks=5))
    assert sizing.num_blocks == (5,)
    assert sizing.max_model_len == sizing.num_tokens == 64
    assert any("capped by the KV pool, 8192 wanted" in line for line in sizing.lines)


def test_windows_get_what_they_can_use_and_full_groups_the_rest():
    sizing = size_kv(GEMMA)
    window_bytes, full_bytes = 512 * 2 * 15 * 16, 512 * 2 * 3 * 16
    assert sizing.block_bytes == (window_bytes, full_bytes)
    windows = 64 * (512 // 16 + 1) + 512 // 16 + 1
    assert sizing.num_blocks == (windows, ((2 << 30) - windows * window_bytes) // full_bytes)
    assert sizing.max_model_len == 32768


def test_windows_get_at_most_half_of_a_small_budget_but_enough_for_one_step():
    sizing = size_kv(changed(GEMMA, kv_cache_memory=256 << 20))
    assert sizing.num_blocks[0] * sizing.block_bytes[0] <= 128 << 20
    assert sizing.total_bytes <= 256 << 20
    least = size_kv(changed(GEMMA, kv_cache_memory=30 << 20))
    assert least.num_blocks[0] == 512 // 16 + 1 + 512 // 16 + 1


@pytest.mark.parametrize("memory", [30 << 20, 64 << 20, 1 << 30])
@pytest.mark.parametrize("batched", [16, 500, 512])
def test_a_lone_sequence_always_fits_in_what_sizing_gives(memory, batched):
    request = changed(GEMMA, kv_cache_memory=memory, max_num_batched_tokens=batched)
    sizing = size_kv(request)
    kv = KVManager([group.spec for group in request.groups], sizing.num_blocks, 16)
    assert kv.max_tokens(sizing.max_model_len) == sizing.max_model_len
    assert kv.max_chunk(batched, sizing.max_model_len) == batched


def test_short_contexts_need_no_more_than_their_length():
    sizing = size_kv(changed(GEMMA, max_model_len=64, available=1 << 40))
    assert sizing.num_blocks == (64 * 4 + 1, 64 * 4 + 1)


def test_a_model_of_windows_only():
    sizing = size_kv(changed(GEMMA, groups=(KVGroup(WINDOW, 18),)))
    assert sizing.num_blocks == (64 * 33 + 32 + 1,)
    assert sizing.max_model_len == 32768
    with pytest.raises(ConfigError, match="has none"):
        size_kv(changed(GEMMA, groups=(KVGroup(WINDOW, 18),), num_kv_blocks=9))


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (BASE, {"max_model_len": 8193}, "max_model_len is 8193; the model's context is 8192"),
        (BASE, {"num_kv_blocks": 1}, "at least 2"),
        (BASE, {"kv_cache_memory": 1000}, "too small"),
        (BASE, {"available": 0}, "too small"),
        (GEMMA, {"kv_cache_memory": 1 << 20}, "too small"),
    ],
)
def test_what_cannot_work_is_refused(base, fields, message):
    with pytest.raises(ConfigError, match=message):
        size_kv(changed(base, **fields))


def test_every_line_names_a_flag():
    for request in (BASE, GEMMA, changed(BASE, num_kv_blocks=9), changed(BASE, max_model_len=77)):
        lines = size_kv(request).lines
        assert len(lines) == 3 + len(request.groups)
        assert all("(--" in line or "--max-model-len" in line for line in lines), lines
