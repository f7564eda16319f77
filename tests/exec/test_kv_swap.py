"""KV outside the pools: the wire layout, where it is kept, and that executors give and take the same blocks."""

import numpy as np
import pytest
from tiny import tiny_model

from yeoul.errors import ConfigError, EngineError
from yeoul.exec.kv_wire import decode, encode, fingerprint
from yeoul.exec.native import NativeExecutor
from yeoul.exec.protocol import ExecutorLimits
from yeoul.exec.reference import ReferenceExecutor
from yeoul.exec.swap import SwapStore
from yeoul.models.registry import load_model
from yeoul.step import BlockCopy, PlanRow, RowStatus, SlotState, StepPlan, SwapIn, SwapOut
from yeoul.weights.gguf import GGUFFile

NUMERICS = fingerprint("test", 1)
TOKENS = tuple(np.random.default_rng(5).integers(0, 384, 90).tolist())
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 256, "block_size": 16}


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, 256, (3, 2, 64), np.uint8), rng.integers(0, 256, (3, 2, 32), np.uint8)),
        (rng.integers(0, 256, (0, 1, 8), np.uint8), rng.integers(0, 256, (0, 1, 8), np.uint8)),
    ]


def test_the_wire_gives_back_what_it_got():
    for (keys, values), (own_keys, own_values) in zip(
        decode(NUMERICS, encode(NUMERICS, arrays())), arrays(), strict=True
    ):
        assert np.array_equal(keys, own_keys) and np.array_equal(values, own_values)


def test_every_damaged_byte_is_found():
    data = encode(NUMERICS, arrays())
    for at in range(0, len(data), 7):
        with pytest.raises(EngineError, match="swapped KV"):
            decode(NUMERICS, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


@pytest.mark.parametrize("cut", [0, 3, 30, 39, 45, 60, 100, -1])
def test_incomplete_bytes_are_refused(cut):
    with pytest.raises(EngineError, match="swapped KV"):
        decode(NUMERICS, encode(NUMERICS, arrays())[:cut])
    with pytest.raises(EngineError, match="longer"):
        decode(NUMERICS, encode(NUMERICS, arrays()) + b"x")


def test_other_numerics_are_refused():
    with pytest.raises(EngineError, match="numerics"):
        decode(fingerprint("test", 2), encode(NUMERICS, arrays()))


@pytest.mark.parametrize("in_files", [False, True])
def test_a_store_gives_bytes_back_once_and_leaves_nothing_behind(tmp_path, in_files):
    store = SwapStore(str(tmp_path / "swap") if in_files else None)
    store.put(1, b"one")
    store.put(2, b"two")
    assert store.take(1) == b"one"
    with pytest.raises(EngineError):
        store.take(1)
    store.drop(2)
    store.drop(77)
    with pytest.raises(EngineError):
        store.take(2)
    store.put(3, b"three")
    store.close()
    store.close()
    assert not in_files or list((tmp_path / "swap").iterdir()) == []


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    store = SwapStore(str(tmp_path))
    store.put(1, b"one")

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    store.put(2, b"two")
    assert (store.take(2), store.take(1)) == (b"two", b"one")


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="swap folder"):
        SwapStore(str(tmp_path / "file"))


@pytest.fixture(scope="module")
def model(tiny_gemma3):
    return load_model(GGUFFile.open(tiny_gemma3))


def executor(model, kind):
    limits = ExecutorLimits(num_blocks=(24,) * len(model.program.kv_groups), **LIMITS)
    return NativeExecutor(model, limits) if kind == "native" else ReferenceExecutor(model, limits, "as_native")


def both(model, *ids):
    return (tuple(ids),) * len(model.program.kv_groups)


def first_row(model, blocks, tokens=TOKENS[:60], start=0, slot=0):
    state = SlotState(seed=3, sequence_index=0, temperature=1.0, num_logprobs=3)
    return PlanRow(slot, start, len(tokens), tokens, both(model, *blocks), True, state)


def run(target, plan):
    return target.collect(target.submit(plan)).rows


def test_executors_agree_on_the_canonical_layout(model):
    """Same model, same tokens: the values differ by rounding only, so every element is at its place."""
    native, reference = (executor(model, kind) for kind in ("native", "reference"))
    for target in (native, reference):
        run(target, StepPlan(0, (first_row(model, range(1, 5)),)))
    for group in range(len(model.program.kv_groups)):
        theirs = reference.read_blocks(group, [2, 3])
        for own, other in zip(native._swapper._access.read_blocks(group, [2, 3]), theirs, strict=True):
            assert own.shape == other.shape
            a, b = own.view(np.float16).astype(float), other.view(np.float16).astype(float)
            assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.995


def with_dtypes(path, *dtypes):
    return load_model(GGUFFile.open(path), k_dtype=dtypes[0], v_dtype=dtypes[1])


def int8_numbers(wire, heads, size):
    """Wire bytes [blocks, layers, bytes] as numbers [blocks, layers, heads, tokens, size]."""
    parts = wire.reshape(*wire.shape[:2], heads, 16 * (size + 2))
    codes = parts[..., : 16 * size].view(np.int8).reshape(*parts.shape[:3], 16, size)
    scales = np.ascontiguousarray(parts[..., 16 * size :]).view(np.float16)
    return codes * scales[..., None].astype(np.float32)


def test_the_wire_carries_int8_scales_behind_each_head(tiny_gemma3):
    model = with_dtypes(tiny_gemma3, "int8", "int8")
    native, reference = (executor(model, kind) for kind in ("native", "reference"))
    for target in (native, reference):
        run(target, StepPlan(0, (first_row(model, range(1, 5)),)))
    for group, (spec, _) in enumerate(model.program.kv_groups):
        theirs = reference.read_blocks(group, [2, 3])
        for own, other in zip(native._swapper._access.read_blocks(group, [2, 3]), theirs, strict=True):
            numbers = int8_numbers(own, spec.num_kv_heads, spec.key_size)
            expected = other.view(np.float32).reshape(numbers.shape)
            assert np.corrcoef(numbers.ravel(), expected.ravel())[0, 1] > 0.995
            assert np.abs(numbers - expected).max() < 0.2 * np.abs(expected).max()


@pytest.mark.parametrize("dtypes", [("int8", "f16"), ("f32", "int8"), ("fp8_e4m3", "bf16"), ("bf16", "fp8_e5m2")])
def test_blocks_come_back_to_other_places_with_every_byte(tiny_gemma3, dtypes):
    model = with_dtypes(tiny_gemma3, *dtypes)
    native = executor(model, "native")
    run(native, StepPlan(0, (first_row(model, range(1, 5)),)))
    access, program = native._swapper._access, native._program
    for group in range(len(model.program.kv_groups)):
        access.write_blocks(group, [9, 8], *access.read_blocks(group, [2, 3]))
        for source, target in ((2, 9), (3, 8)):
            assert np.array_equal(program.read_block(group, source), program.read_block(group, target))
            assert program.read_block(group, source).any()


def test_other_dtypes_and_scales_are_other_numerics(tiny_gemma3, tmp_path):
    scales = {"gemma3.attention.k_cache_scales": [0.5, 0.5]}
    plain, scaled = (
        tiny_model(tmp_path, "gemma3", layers=2, pattern=2, seed=seed, metadata=metadata)
        for seed, metadata in ((0, {}), (1, scales))
    )
    prints = {
        executor(with_dtypes(path, *dtypes), kind)._swapper._numerics
        for path in (plain, scaled)
        for dtypes in (("f16", "f16"), ("f16", "int8"), ("int8", "f16"))
        for kind in ("native", "reference")
    }
    assert len(prints) == 12


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_what_went_out_and_came_back_elsewhere_gives_the_same_token(model, kind):
    stays, swapped = executor(model, kind), executor(model, kind)
    for target in (stays, swapped):
        (first,) = run(target, StepPlan(0, (first_row(model, range(1, 5)),)))
    token = first.token_ids
    (expected,) = run(stays, StepPlan(1, (PlanRow(0, 60, 1, token, both(model), True),)))
    other = first_row(model, range(1, 5), TOKENS[20:80], slot=1)  # Overwrites the blocks in the very same step.
    run(swapped, StepPlan(1, (other,), (0,), swap_outs=(SwapOut(9, both(model, 1, 2, 3, 4)),)))
    row = first_row(model, range(11, 15), token, start=60)
    (got, _) = run(
        swapped,
        StepPlan(
            2,
            (row, PlanRow(1, 60, 1, (5,), both(model), True)),
            swap_ins=(SwapIn(9, 0, both(model, 11, 12, 13, 14)),),
        ),
    )
    if kind == "native":
        assert got == expected
    else:
        assert got.token_ids == expected.token_ids


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_damage_ends_its_own_row_only(model, kind):
    target = executor(model, kind)
    run(target, StepPlan(0, (first_row(model, range(1, 5)), first_row(model, range(5, 9), slot=1))))
    run(
        target,
        StepPlan(
            1, (PlanRow(1, 60, 1, (5,), both(model), True),), (0,), swap_outs=(SwapOut(9, both(model, 1, 2, 3, 4)),)
        ),
    )
    memory = target._swapper._store._memory
    memory[9] = memory[9][:-1] + bytes([memory[9][-1] ^ 1])
    row = first_row(model, range(11, 15), (5,), start=60)
    swap_in = SwapIn(9, 0, both(model, 11, 12, 13, 14))
    bad, good = run(target, StepPlan(2, (row, PlanRow(1, 61, 1, (5,), both(model), True)), swap_ins=(swap_in,)))
    assert bad.status is RowStatus.ERROR and bad.token_ids == ()
    assert good.status is RowStatus.OK and len(good.token_ids) == 1
    assert memory == {}


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_a_copied_block_is_the_same_block(model, kind):
    target = executor(model, kind)
    (first,) = run(target, StepPlan(0, (first_row(model, range(1, 5)),)))
    copies = tuple(BlockCopy(group, 4, 20) for group in range(len(model.program.kv_groups)))
    row = first_row(model, (1, 2, 3, 20), TOKENS[59:60], start=59, slot=1)
    goes_on = PlanRow(0, 60, 1, first.token_ids, both(model), True)
    _, again = run(target, StepPlan(1, (goes_on, row), block_copies=copies))
    assert again.token_ids == first.token_ids and (kind == "reference" or again == first)


@pytest.mark.parametrize("blocks", [(0, 1), (1, 0), (1, 24), (99, 1)])
@pytest.mark.parametrize("kind", ["native", "reference"])
def test_blocks_that_do_not_exist_are_refused(model, kind, blocks):
    target = executor(model, kind)
    plan = StepPlan(0, (first_row(model, range(1, 5)),), block_copies=(BlockCopy(0, *blocks),))
    with pytest.raises((EngineError, IndexError)):
        run(target, plan)
