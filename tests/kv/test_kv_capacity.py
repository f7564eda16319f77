"""What fits, and the one number to change where it does not: applied, every such number works."""

import re
import shlex
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yeoul.errors import ConfigError
from yeoul.kv.manager import KVManager
from yeoul.kv.sizing import (
    KVGroup,
    KVRequest,
    concurrent,
    concurrent_formula,
    how_to_fit,
    human,
    least_memory,
    size_kv,
    token_bytes,
    token_formula,
)
from yeoul.types import KVKind, KVSpec

SIZE = 16
FULL = KVGroup(KVSpec(KVKind.FULL, 3, 64, 64), 30)
BASE = KVRequest(
    groups=(FULL,),
    block_size=SIZE,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    model_context=8192,
    available=8 << 30,
)


def changed(base: KVRequest, **fields: object) -> KVRequest:
    return msgspec.structs.replace(base, **fields)


def applied(base: KVRequest, text: str) -> KVRequest:
    """The request with the flags that a hint names."""
    words = shlex.split(text)
    values = dict(pairwise(words))
    flags = {word[2:].replace("-", "_"): values[word] for word in words if word.startswith("--")}
    return changed(
        base,
        **{name: int(value.removesuffix("MiB")) << 20 * value.endswith("MiB") for name, value in flags.items()},
    )


@st.composite
def requests(draw) -> KVRequest:
    full = [KVGroup(KVSpec(KVKind.FULL, draw(st.integers(1, 8)), 64, 128), draw(st.integers(1, 40)))]
    windows = [
        KVGroup(KVSpec(KVKind.WINDOW, 2, 64, 64, window=window), draw(st.integers(1, 40)))
        for window in draw(st.lists(st.sampled_from([17, 512, 1024]), max_size=2, unique=True))
    ]
    return changed(
        BASE,
        groups=tuple(draw(st.permutations([*full, *windows]))),
        max_num_seqs=draw(st.integers(1, 40)),
        max_num_batched_tokens=draw(st.sampled_from([16, 100, 512])),
    )


@settings(max_examples=60, deadline=None)
@given(requests(), st.integers(1, 8192), st.data())
def test_the_least_memory_holds_so_many_and_a_mebibyte_less_does_not(request, num_tokens, data):
    count = data.draw(st.integers(1, request.max_num_seqs))
    least = least_memory(request, num_tokens, count)
    sizing = size_kv(changed(request, kv_cache_memory=least))
    assert sizing.max_model_len >= num_tokens
    assert concurrent(request, sizing.num_blocks, num_tokens) >= count
    if least > 1 << 20:
        try:
            less = size_kv(changed(request, kv_cache_memory=least - (1 << 20)))
        except ConfigError:
            return
        too_short = less.max_model_len < num_tokens
        assert too_short or concurrent(request, less.num_blocks, num_tokens) < count


@settings(max_examples=40, deadline=None)
@given(requests(), st.integers(1, 2000), st.integers(8, 200))
def test_so_many_grow_to_their_end_side_by_side(request, num_tokens, mebibytes):
    """As the scheduler does it: whoever computes a chunk first gives back what lies before the window."""
    try:
        sizing = size_kv(changed(request, kv_cache_memory=mebibytes << 20))
    except ConfigError:
        return
    count = concurrent(request, sizing.num_blocks, num_tokens)
    kv = KVManager([group.spec for group in request.groups], sizing.num_blocks, SIZE)
    tables = [kv.open() for _ in range(count)]
    for table in tables:
        for start in range(0, num_tokens, request.max_num_batched_tokens):
            end = min(start + request.max_num_batched_tokens, num_tokens)
            assert kv.grow(table, end) is not None
            kv.release_window(table, end)
    if count < request.max_num_seqs and all(group.spec.kind is KVKind.FULL for group in request.groups):
        assert kv.grow(kv.open(), num_tokens) is None


@pytest.mark.parametrize(
    ("fields", "num_tokens", "flags"),
    [
        ({"num_kv_blocks": 5}, 100, "--num-kv-blocks 8"),
        ({"kv_cache_memory": 1 << 20}, 1000, "--kv-cache-memory 23MiB"),
        ({"max_model_len": 100}, 101, "--max-model-len 101"),
        ({"max_model_len": 100, "kv_cache_memory": 5 << 20}, 8192, "--max-model-len 8192 and --kv-cache-memory 181MiB"),
        ({"available": 64 << 20}, 8192, "--kv-cache-memory 181MiB"),
    ],
)
def test_how_to_fit_names_flags_that_work(fields, num_tokens, flags):
    request = changed(BASE, **fields)
    assert size_kv(request).max_model_len < num_tokens
    assert how_to_fit(request, num_tokens) == flags
    assert size_kv(applied(request, flags)).max_model_len >= num_tokens


def test_no_flag_makes_the_models_context_longer():
    assert how_to_fit(BASE, 8193) is None


@pytest.mark.parametrize("fields", [{"kv_cache_memory": 1000}, {"available": 0}])
def test_a_pool_that_is_too_small_names_what_starts_and_what_holds_all(fields):
    with pytest.raises(ConfigError) as caught:
        size_kv(changed(BASE, **fields))
    starts, whole = re.findall(r"(\d+)MiB", caught.value.hint)
    assert size_kv(changed(BASE, kv_cache_memory=int(starts) << 20)).max_model_len >= 1
    assert size_kv(changed(BASE, kv_cache_memory=int(whole) << 20)).max_model_len == 8192


@pytest.mark.parametrize("fields", [{"num_kv_blocks": 5}, {"kv_cache_memory": 5 << 20}])
def test_a_capped_length_names_what_would_not_cap_it(fields):
    request = changed(BASE, **fields)
    (line,) = [line for line in size_kv(request).lines if "capped" in line]
    assert size_kv(applied(request, re.search(r"\((--.*)\)", line)[1])).max_model_len == 8192


def test_a_pool_over_the_free_memory_says_how_much_is_free():
    first = size_kv(changed(BASE, kv_cache_memory=2 << 30, available=(1 << 30) + 5)).lines[0]
    assert first.endswith("Only 1.0 GiB are free: memory may run out above --kv-cache-memory 1024MiB")
    assert "Only" not in size_kv(BASE).lines[0]


def test_formulas_come_to_the_same_as_the_sums():
    assert token_formula(FULL) == "2 x 30 layers x 3 kv heads x 64 x 2 bytes = 23040 bytes"
    mixed = KVGroup(KVSpec(KVKind.FULL, 2, 8, 4, "f32", "f16"), 3)
    assert token_formula(mixed) == "3 layers x 2 kv heads x (K 8 x 4 bytes + V 4 x 2 bytes) = 240 bytes"
    scaled = KVGroup(KVSpec(KVKind.FULL, 2, 8, 8, "int8", "int8"), 3)
    assert token_formula(scaled) == "2 x 3 layers x 2 kv heads x (8 x 1 bytes + 2 of scale) = 120 bytes"
    for group in (FULL, mixed, scaled):
        assert token_formula(group).endswith(f"= {token_bytes(group.spec) * group.num_layers} bytes")
    window = KVGroup(KVSpec(KVKind.WINDOW, 1, 8, 8, window=32), 3)
    assert concurrent_formula(BASE, FULL, 101, 40) == "100 blocks / (40 / 16, rounded up) = 33"
    assert concurrent_formula(BASE, window, 101, 400) == "(100 blocks - 512 / 16 of a step) / (32 / 16 + 1) = 22"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), ((1 << 30) - 1, "1.0 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_sizes_for_people(size, text):
    assert human(size) == text
