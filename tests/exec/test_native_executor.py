"""NativeExecutor: which kernels it takes, what it refuses, and that broken numbers end one row only."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from native_kit import GREEDY, ISA_LEVELS, Stay, limits_of, native, opened
from tiny import tiny_model

from yeoul import _native
from yeoul.errors import ConfigError, EngineError, UnsupportedModelError
from yeoul.exec.native import NativeExecutor, choose_isa
from yeoul.exec.protocol import Ticket
from yeoul.models.model import Model
from yeoul.step import PlanRow, RowStatus, SlotState, StepPlan
from yeoul.weights.dequant import dequantize
from yeoul.weights.tensor import Tensor, TensorType


@pytest.fixture
def model(tiny_qwen2: Path) -> Iterator[Model]:
    with opened(tiny_qwen2) as model:
        yield model


def run(executor: NativeExecutor, *rows: PlanRow, step_id: int = 0, released: tuple[int, ...] = ()):
    return executor.collect(executor.submit(StepPlan(step_id, rows, released))).rows


def test_auto_is_the_best_level(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("YEOUL_ISA", raising=False)
    assert choose_isa("auto") == (ISA_LEVELS[0], "the best this processor runs")


def test_the_environment_forces_a_level(monkeypatch: pytest.MonkeyPatch, model: Model):
    monkeypatch.setenv("YEOUL_ISA", "generic")
    assert choose_isa("auto") == ("generic", "YEOUL_ISA")
    assert "native generic (YEOUL_ISA), 2 threads" in native(model).describe()
    if len(ISA_LEVELS) > 1:
        assert choose_isa(ISA_LEVELS[0]) == (ISA_LEVELS[0], "asked for"), "an option beats the environment"


def test_a_level_that_does_not_run_here(monkeypatch: pytest.MonkeyPatch, model: Model):
    foreign = "neon" if "neon" not in ISA_LEVELS else "avx2"
    with pytest.raises(ConfigError, match="does not run on this processor") as error:
        native(model, foreign)
    assert "generic" in error.value.hint
    monkeypatch.setenv("YEOUL_ISA", foreign)
    with pytest.raises(ConfigError, match=foreign):
        choose_isa("auto")
    monkeypatch.setenv("YEOUL_ISA", "sse9")
    with pytest.raises(ConfigError, match="YEOUL_ISA must be one of"):
        choose_isa("auto")


def test_the_core_refuses_an_unknown_level():
    with pytest.raises(ValueError, match="generic"):
        _native.Program(_native.Pool(1), "mmx", 64, [])


def test_a_program_without_buffers_does_not_run():
    with pytest.raises(ValueError, match="bind"):
        _native.Program(_native.Pool(1), "generic", 64, []).run(0, 0, 0, 0, None, 0, 0)


@pytest.mark.parametrize("view", [(0, 64, 16, False), (-64, 0, 16, False), (64, 0, 16, False)])
def test_reading_outside_the_arena(view: tuple[int, int, int, bool]):
    program = _native.Program(_native.Pool(1), "generic", 64, [])
    assert program.read((0, 0, 16, False), 1, 64).tolist() == [0] * 64
    with pytest.raises(IndexError, match="outside the arena"):
        program.read(view, 2, 64)


def test_heads_that_are_too_large(tmp_path: Path):
    with (
        opened(tiny_model(tmp_path, "llama", head_dim=544, heads=1, kv_heads=1)) as model,
        pytest.raises(UnsupportedModelError, match="544"),
    ):
        native(model)


def test_rows_that_do_not_sample_have_empty_results(model: Model):
    limits, executor = limits_of(model), native(model)
    stays = [Stay(model, limits, slot, range(1, 9)) for slot in (0, 1)]
    first, second = run(executor, stays[0].row(5), stays[1].row(6, sample=True))
    assert (first.token_ids, first.status, len(second.token_ids)) == ((), RowStatus.OK, 1)
    assert run(executor) == ()


def test_sampled_tokens_feed_back_from_the_slot(model: Model):
    state = SlotState(seed=11, sequence_index=1, temperature=0.8, top_p=0.95, num_logprobs=2)
    limits, executor, prompt = limits_of(model), native(model), list(range(20, 40))
    out = list(run(executor, Stay(model, limits, 0, prompt, state).row(20, sample=True))[0].token_ids)
    for position in range(20, 30):
        new = (((90,),) if position == 32 else ((),)) * len(model.program.kv_groups)
        (row,) = run(executor, PlanRow(0, position, 1, (), new, True))
        out += row.token_ids
        assert len(row.logprobs[0].top) == 2
    again = native(model)
    (first,) = run(again, Stay(model, limits, 2, prompt + out[:-1], state).row(30, sample=True))
    assert first.token_ids == (out[-1],)


BROKEN = 7
"""A token whose embedding is NaN in the model below."""


@pytest.fixture
def broken(model: Model) -> Model:
    embedding = model.weights["token_embd.weight"]
    values = dequantize(embedding).copy()
    values[BROKEN] = np.nan
    poisoned = Tensor(embedding.name, TensorType.F32, embedding.shape, values.reshape(-1).view(np.uint8))
    return replace(model, weights={**model.weights, embedding.name: poisoned})


@pytest.mark.parametrize("isa", ISA_LEVELS)
def test_a_broken_row_is_reported_and_its_neighbour_goes_on(broken: Model, isa: str):
    limits, executor = limits_of(broken), native(broken, isa)
    good, bad = Stay(broken, limits, 0, [1, 2, 3]), Stay(broken, limits, 1, [4, BROKEN])
    together = run(executor, bad.row(2, sample=True), good.row(3, sample=True))
    assert (together[0].status, together[0].token_ids) == (RowStatus.NAN, ())
    assert together[1].status == RowStatus.OK
    assert together[1] == run(native(broken, isa), Stay(broken, limits, 0, [1, 2, 3]).row(3, sample=True))[0]


def test_blocks_of_a_broken_row_can_be_used_again(broken: Model):
    """What it left in the cache, NaN kept out, cannot reach the next sequence in the same blocks."""
    limits, executor = limits_of(broken), native(broken)
    run(executor, Stay(broken, limits, 0, [BROKEN] * 30).row(30, sample=True))
    after = run(executor, Stay(broken, limits, 0, [1, 2, 3]).row(3, sample=True), released=(0,))
    assert after == run(native(broken), Stay(broken, limits, 0, [1, 2, 3]).row(3, sample=True))


def test_a_row_without_sample_reports_broken_keys(broken: Model):
    limits, executor = limits_of(broken), native(broken)
    assert run(executor, Stay(broken, limits, 0, [1, BROKEN, 2]).row(3))[0].status == RowStatus.NAN


def unsound(groups: int) -> dict[str, tuple[PlanRow, str]]:
    """Rows that must be refused before anything is read or written out of bounds."""
    none, some = ((),) * groups, ((1, 2),) * groups
    return {
        "slot": (PlanRow(4, 0, 1, (1,), some, True, GREEDY), "out of bounds"),
        "negative slot": (PlanRow(-1, 0, 1, (1,), some, True, GREEDY), "out of bounds"),
        "no state": (PlanRow(1, 0, 1, (1,), some, True), "no state"),
        "negative start": (PlanRow(0, -1, 1, (1,), some, True, GREEDY), "out of bounds"),
        "no tokens": (PlanRow(0, 0, 0, (), some, True, GREEDY), "out of bounds"),
        "length": (PlanRow(0, 60, 5, (1,) * 5, some, True, GREEDY), "out of bounds"),
        "table": (PlanRow(0, 16, 17, (1,) * 17, some, True, GREEDY), "too few blocks"),
        "token": (PlanRow(0, 0, 1, (384,), some, True, GREEDY), "outside the vocabulary"),
        "negative token": (PlanRow(0, 0, 1, (-1,), some, True, GREEDY), "outside the vocabulary"),
        "never sampled": (PlanRow(0, 0, 1, (), some, True, GREEDY), "outside the vocabulary"),
        "budget": (PlanRow(0, 0, 33, (1,) * 33, ((1, 2, 3),) * groups, True, GREEDY), "larger than"),
        "count": (PlanRow(0, 0, 3, (1,), some, True, GREEDY), "1 token ids for 3"),
        "count from slot": (PlanRow(0, 0, 3, (), some, True, GREEDY), "0 token ids for 3"),
        "block": (PlanRow(0, 0, 1, (1,), ((17,),) * groups, True, GREEDY), "outside the pool"),
        "negative block": (PlanRow(0, 0, 1, (1,), ((-1,),) * groups, True, GREEDY), "outside the pool"),
        "wide table": (PlanRow(0, 0, 1, (1,), (tuple(range(1, 8)),) * groups, True, GREEDY), "more blocks"),
        "groups": (PlanRow(0, 0, 1, (1,), (*some, (1,)), True, GREEDY), "KV groups"),
        "no groups": (PlanRow(0, 0, 1, (1,), (), True, GREEDY), "KV groups"),
        "null": (PlanRow(0, 0, 1, (1,), none, True, GREEDY), "too few blocks"),
    }


@pytest.mark.parametrize("name", unsound(1))
def test_unsound_plans_are_refused(model: Model, name: str):
    row, message = unsound(len(model.program.kv_groups))[name]
    executor = native(model, tokens=32, length=64)
    with pytest.raises(EngineError, match=message):
        run(executor, row)
    good = Stay(model, limits_of(model, tokens=32, length=64), 0, [1, 2, 3])
    assert run(executor, good.row(3, sample=True))[0].status == RowStatus.OK


def test_a_released_slot_has_no_state(model: Model):
    executor, stay = native(model), Stay(model, limits_of(model), 0, [1, 2, 3, 4])
    run(executor, stay.row(3))
    with pytest.raises(EngineError, match="no state"):
        run(executor, stay.row(1), released=(0,))
    with pytest.raises(EngineError, match="slot 9"):
        run(executor, released=(9,))


def test_a_slot_twice_in_a_step(model: Model):
    executor, stay = native(model), Stay(model, limits_of(model), 0, [1, 2, 3, 4])
    with pytest.raises(EngineError, match="two rows"):
        run(executor, stay.row(2), stay.row(2))


def test_tickets_are_collected_once(model: Model):
    executor = native(model)
    ticket = executor.submit(StepPlan(0, ()))
    executor.collect(ticket)
    for unknown in (ticket, Ticket(99)):
        with pytest.raises(EngineError, match=f"ticket {unknown} is unknown"):
            executor.collect(unknown)
    executor.close()
    executor.close()


def test_an_executor_leaves_no_threads(model: Model):
    """Workers end with the last reference, also of one that never ran."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("this system does not list a process's threads")
    gc.collect()  # executors of earlier tests
    before = {task.name for task in tasks.iterdir()}
    executors = [native(model, threads=3) for _ in range(4)]
    assert len({task.name for task in tasks.iterdir()} - before) == 8
    del executors
    gc.collect()
    assert {task.name for task in tasks.iterdir()} <= before
