"""The reference executor: phases and neighbours do not matter, caches are read back, unsound plans are refused."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import FAMILIES, tiny_model

from yeoul.config import EngineConfig
from yeoul.errors import ConfigError, EngineError
from yeoul.exec import create_executor
from yeoul.exec.protocol import ExecutorLimits, Ticket
from yeoul.exec.reference import ReferenceExecutor
from yeoul.exec.reference_math import quantize_activations
from yeoul.exec.reference_sampling import sample
from yeoul.models.model import Model
from yeoul.models.registry import load_model
from yeoul.ops.passes import fuse
from yeoul.step import PlanRow, RowStatus, SlotState, StepPlan
from yeoul.weights.dequant import dequantize
from yeoul.weights.gguf import GGUFFile
from yeoul.weights.tensor import Tensor, TensorType

BLOCK = 16
NUM_BLOCKS = 24
GREEDY = SlotState(seed=3, sequence_index=0)
TOKENS = np.random.default_rng(5).integers(0, 384, 90).tolist()


@pytest.fixture(scope="module")
def models(tiny_paths: Mapping[str, Path]) -> dict[str, Model]:
    return {family: load_model(GGUFFile.open(path)) for family, path in tiny_paths.items()}


def executor(model: Model, mode: str = "as_native", **sizes: object) -> ReferenceExecutor:
    groups = len(model.program.kv_groups)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 256, "block_size": BLOCK}
    limits |= {"num_blocks": (NUM_BLOCKS,) * groups, **sizes}
    return ReferenceExecutor(model, ExecutorLimits(**limits), mode)


def row(model: Model, start: int, tokens: list[int], blocks: tuple[int, ...] = (), **fields: object) -> PlanRow:
    """One row of a sequence whose every KV group uses the same block ids."""
    default = {"slot": 0, "sample": True, "num_tokens": len(tokens), "state": GREEDY if start == 0 else None}
    default |= {"new_blocks": (blocks,) * len(model.program.kv_groups)}
    return PlanRow(start=start, token_ids=tuple(tokens), **{**default, **fields})


def step(*rows: PlanRow, step_id: int = 0, released: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(step_id, rows, released)


def run(target: ReferenceExecutor, plan: StepPlan):
    return target.collect(target.submit(plan))


def prefill(model: Model, mode: str, tokens: list[int]) -> np.ndarray:
    return executor(model, mode).logits(step(row(model, 0, tokens, tuple(range(1, 8)))))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["exact", "as_native"])
def test_chunks_and_decode_equal_one_prefill(models, family: str, mode: str):
    """90 tokens reach past the window of 32. Float64 sums differ only in the last bits between batch shapes."""
    model = models[family]
    whole = prefill(model, mode, TOKENS)
    target, parts, start = executor(model, mode), [], 0
    for count in (7, 40, 1, 1, 30, 1, 10):
        blocks = (9, 3, 5, 1, 2, 20) if start == 0 else ()
        parts.append(target.logits(step(row(model, start, TOKENS[start : start + count], blocks))))
        start += count
    # One rounding to float32 may fall the other way, and moves an int8 by one; exact mode has no such steps.
    tolerance = 2e-5 if mode == "exact" else 0.1
    assert np.abs(np.concatenate(parts) - whole).max() < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_one_step_do_not_see_each_other(models, family: str):
    model = models[family]
    first, second = TOKENS[:40], TOKENS[40:57]
    both = executor(model, "exact").logits(step(row(model, 0, first, (1, 2, 3)), row(model, 0, second, (4, 5), slot=2)))
    alone = [prefill(model, "exact", tokens) for tokens in (first, second)]
    assert np.abs(both - np.concatenate(alone)).max() < 2e-5


def test_sampled_tokens_feed_back_from_the_slot(models):
    model = models["llama"]
    target, out = executor(model), []
    state = SlotState(seed=11, sequence_index=1, temperature=0.8, top_p=0.95, num_logprobs=2)
    result = run(target, step(row(model, 0, TOKENS[:20], (1, 2, 3), state=state)))
    out += result.rows[0].token_ids
    for position in range(20, 30):
        result = run(target, step(row(model, position, [], num_tokens=1), step_id=position))
        out += result.rows[0].token_ids
        assert result.step_id == position
        assert result.finished_at >= result.started_at
        assert len(result.rows[0].logprobs[0].top) == 2
    logits = prefill(model, "as_native", TOKENS[:20] + out[:-1])[19:]
    assert [sample(row_logits, state, 20 + i).token_ids[0] for i, row_logits in enumerate(logits)] == out


def test_rows_that_do_not_sample_have_empty_results(models):
    model = models["qwen2"]
    rows = row(model, 0, TOKENS[:5], (1,), sample=False), row(model, 0, TOKENS[:6], (2,), slot=1)
    first, second = run(executor(model), step(*rows)).rows
    assert (first.token_ids, first.status, len(second.token_ids)) == ((), RowStatus.OK, 1)


def test_a_plan_without_rows_or_without_outputs_runs(models):
    model = models["llama"]
    target = executor(model)
    assert run(target, step()).rows == ()
    assert run(target, step(row(model, 0, TOKENS[:4], (1,), sample=False))).rows[0].token_ids == ()


def test_keys_and_values_are_read_back_rounded(models):
    """With float32 keys and values the same tokens give other logits than with float16; exact mode ignores both."""
    paths = {"f16": models["llama"], "f32": _with_kv(models["llama"], "f32")}
    native = {dtype: prefill(model, "as_native", TOKENS) for dtype, model in paths.items()}
    exact = {dtype: prefill(model, "exact", TOKENS) for dtype, model in paths.items()}
    assert np.abs(native["f16"] - native["f32"]).max() > 1e-4
    assert np.array_equal(exact["f16"], exact["f32"])


def _with_kv(model: Model, dtype: str) -> Model:
    class File:
        architecture = model.spec.architecture
        metadata = model.metadata
        tensors = model.weights

    return load_model(File(), k_dtype=dtype, v_dtype=dtype)


def test_modes_differ_by_the_rounding_of_activations(models):
    for model in models.values():
        exact, native = prefill(model, "exact", TOKENS), prefill(model, "as_native", TOKENS)
        assert 1e-3 < np.abs(exact - native).max() < 1.5
        assert np.abs(exact - native).mean() < 0.1


def test_activations_of_unquantized_weights_are_not_quantized(tmp_path: Path):
    """What is left is the rounding of keys and values to float16."""
    with GGUFFile.open(tiny_model(tmp_path, "llama", weight_type="F16", weight_types={})) as file:
        model = load_model(file)
    assert np.abs(prefill(model, "exact", TOKENS) - prefill(model, "as_native", TOKENS)).max() < 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_program_computes_the_same(models, family: str):
    model = models[family]
    fused = replace(model, program=fuse(model.program))
    assert len(fused.program.ops) < len(model.program.ops)
    assert np.abs(prefill(fused, "exact", TOKENS) - prefill(model, "exact", TOKENS)).max() < 2e-5


def test_quantized_activations_by_hand():
    x = np.zeros((2, 64))
    x[0, :4] = [127, 0.5, 1.5, -2.5]
    x[0, 32:35] = [-0.254, 0.001, 0.254]
    expected = np.zeros((2, 64))
    expected[0, :4] = [127, 0, 2, -2]
    d = np.float32(np.float32(0.254) / np.float32(127))
    expected[0, 32:35] = [-127 * float(d), 0, 127 * float(d)]
    assert np.array_equal(quantize_activations(x), expected)


def test_quantized_activations_keep_nan_and_drop_subnormals():
    x = np.zeros((1, 96))
    x[0, 3], x[0, 40] = np.nan, 1e-44
    with np.errstate(all="ignore"):
        out = quantize_activations(x)
    assert np.isnan(out[0, 3])
    assert not out[0, 32:].any()


BROKEN = 7
"""A token whose embedding is NaN in the model below."""


@pytest.fixture
def broken(models) -> Model:
    """qwen2, which is not tied, so that only rows with this token have broken logits."""
    model = models["qwen2"]
    embedding = model.weights["token_embd.weight"]
    values = dequantize(embedding).copy()
    values[BROKEN] = np.nan
    poisoned = Tensor(embedding.name, TensorType.F32, embedding.shape, values.reshape(-1).view(np.uint8))
    return replace(model, weights={**model.weights, embedding.name: poisoned})


@pytest.mark.parametrize("mode", ["exact", "as_native"])
def test_a_broken_row_is_reported_and_its_neighbour_goes_on(broken: Model, mode: str):
    good, bad = row(broken, 0, [1, 2, 3], (1,)), row(broken, 0, [4, BROKEN], (2,), slot=1)
    target = executor(broken, mode)
    together = run(target, step(bad, good)).rows
    assert (together[0].status, together[0].token_ids) == (RowStatus.NAN, ())
    assert together[1] == run(executor(broken, mode), step(good)).rows[0]
    assert together[1].status == RowStatus.OK
    with pytest.raises(EngineError, match="no token was sampled"):
        run(target, step(row(broken, 2, [], num_tokens=1, slot=1)))


def test_masked_keys_are_not_touched(broken: Model):
    """A NaN in a later token of the same row would reach earlier ones if masked values were multiplied by zero."""
    tokens = [1, 2, 3, 4, BROKEN, 5]
    logits = prefill(broken, "exact", tokens)
    assert np.isnan(logits[4:]).all()
    assert np.array_equal(logits[:4], prefill(broken, "exact", [1, 2, 3, 4, 6, 5])[:4])


UNSOUND = (
    "slot",
    "no state",
    "twice",
    "released",
    "released, then used",
    "budget",
    "length",
    "negative start",
    "no tokens",
    "count",
    "token",
    "negative token",
    "pool",
    "table",
    "null block",
    "same block",
    "gap",
    "stolen",
    "groups",
    "half a table",
)


def unsound(model: Model) -> dict[str, tuple[StepPlan, str]]:
    """Plans that must be refused on a fresh executor in which slot 0 has computed 20 tokens in blocks 1 and 2."""
    many = tuple([1] * 129)
    half_table = ((3,), ()) if len(model.program.kv_groups) == 2 else ()
    return {
        "slot": (step(row(model, 0, [1], (3,), slot=4)), "slot 4 does not exist"),
        "no state": (step(row(model, 0, [1], (3,), slot=1, state=None)), "slot 1 has no state"),
        "twice": (step(row(model, 20, [1]), row(model, 21, [1])), "two rows"),
        "released": (step(released=(3,)), "slot 3 is released but not taken"),
        "released, then used": (step(row(model, 20, [1]), released=(0,)), "slot 0 has no state"),
        "budget": (step(row(model, 0, list(many), tuple(range(3, 13)), slot=1)), "more than the executor"),
        "length": (step(row(model, 250, [1] * 7)), "do not fit"),
        "negative start": (step(row(model, -1, [1])), "do not fit"),
        "no tokens": (step(row(model, 20, [], num_tokens=0)), "do not fit"),
        "count": (step(row(model, 20, [1, 2], num_tokens=3)), "2 token ids for 3"),
        "token": (step(row(model, 20, [model.spec.vocab_size])), "outside the vocabulary"),
        "negative token": (step(row(model, 20, [-1])), "outside the vocabulary"),
        "pool": (step(row(model, 20, [1], (NUM_BLOCKS,))), "outside the pool"),
        "table": (step(row(model, 20, [1] * 13)), "do not fit the table of 2"),
        "null block": (step(row(model, 20, [1] * 13, (0,))), "null block"),
        "same block": (step(row(model, 20, [1]), row(model, 0, [1] * 5, (2,), slot=1)), "one place twice"),
        "gap": (step(row(model, 22, [1])), "position 20 was never written"),
        "stolen": (step(row(model, 3, [1], (5,), slot=1, state=GREEDY)), "position 0 was never written"),
        "groups": (step(row(model, 20, [1], new_blocks=((), (), ()))), "blocks for 3 KV groups"),
        "half a table": (step(row(model, 0, [1], slot=1, new_blocks=half_table)), "KV group"),
    }


@pytest.mark.parametrize("name", UNSOUND)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_unsound_plans_are_refused(models, family: str, name: str):
    model = models[family]
    plan, message = unsound(model)[name]
    target = executor(model)
    run(target, step(row(model, 0, TOKENS[:20], (1, 2))))
    ticket = target.submit(plan)
    with pytest.raises(EngineError, match=message):
        target.collect(ticket)


def test_a_window_group_needs_no_keys_that_nobody_sees(models):
    """Blocks that fell out of the window of 32 may be null when a sequence starts again; the global group's may not."""
    model = models["gemma3"]
    window, full = (0, 1) if model.program.kv_groups[0][0].window else (1, 0)
    target = executor(model)
    run(target, step(row(model, 0, TOKENS[:64], (1, 2, 3, 4))))
    tables = {window: (0, 0, 3, 4, 5), full: (1, 2, 3, 4, 5)}
    again = row(model, 64, TOKENS[64:66], slot=1, state=GREEDY, new_blocks=(tables[0], tables[1]))
    assert run(target, step(again)).rows[0].status == RowStatus.OK
    swapped = row(model, 64, TOKENS[64:66], slot=2, state=GREEDY, new_blocks=(tables[1], tables[0]))
    with pytest.raises(EngineError, match=f"KV group {full}: position 0 was never written"):
        run(target, step(swapped))


def test_a_slot_is_released_and_taken_in_one_plan(models):
    model = models["llama"]
    target = executor(model)
    run(target, step(row(model, 0, TOKENS[:20], (1, 2))))
    fresh = row(model, 0, TOKENS[20:30], (7,))
    assert run(target, step(fresh, released=(0,))).rows == run(executor(model), step(fresh)).rows


def test_tickets_are_collected_once(models):
    target = executor(models["llama"])
    ticket = target.submit(step())
    target.collect(ticket)
    for unknown in (ticket, Ticket(99)):
        with pytest.raises(EngineError, match=f"ticket {unknown} is unknown"):
            target.collect(unknown)


def test_create_executor_chooses_by_name(models):
    model = models["llama"]
    limits = ExecutorLimits(
        max_num_seqs=1, max_num_batched_tokens=8, max_model_len=32, num_blocks=(3,), block_size=BLOCK
    )
    plain = create_executor(model, EngineConfig(model="m", executor="reference"), limits)
    exact = create_executor(model, EngineConfig(model="m", executor="reference-exact"), limits)
    assert "rounding as native" in plain.describe()
    assert "float64" in exact.describe()
    exact.close()
    exact.close()
    with pytest.raises(ConfigError, match="executor"):
        EngineConfig(model="m", executor="cuda")


def test_an_unknown_kv_dtype_is_refused(models):
    with pytest.raises(EngineError, match="no KV dtype 'int3'"):
        executor(_with_kv(models["llama"], "int3"))
