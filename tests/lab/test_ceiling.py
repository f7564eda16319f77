"""Ceilings by hand: bytes over bandwidth, operations over their rate, the slower of the two in every step."""

import math

import pytest

from yeoul.errors import ConfigError
from yeoul.lab.ceiling import Machine, decode_ceiling, prefill_ceiling
from yeoul.models.registry import load_model
from yeoul.ops.cost import StepShape, program_cost, weight_sizes
from yeoul.weights.gguf import GGUFFile

SLOW_MEMORY, SLOW_MATHS = Machine(bandwidth=1e6, ops=1e15), Machine(bandwidth=1e15, ops=1e6)


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3"])
def model(request, tiny_paths):
    return load_model(GGUFFile.open(tiny_paths[request.param]))


def work(model, shape):
    cost = program_cost(model.program, weight_sizes(model.weights), shape)
    return cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes, cost.flops


def test_decode_is_one_step_of_all_rows(model):
    moved, ops = work(model, StepShape(((50, 1),) * 3, 3))
    slow = decode_ceiling(model, SLOW_MEMORY, 3, 50)
    assert slow.seconds == pytest.approx(moved / 1e6) and slow.bound == "memory"
    assert slow.weight_bytes + slow.kv_bytes == moved and slow.ops == ops
    assert slow.tokens_per_second == pytest.approx(3 / slow.seconds)
    assert decode_ceiling(model, SLOW_MATHS, 3, 50).seconds == pytest.approx(ops / 1e6)
    assert decode_ceiling(model, SLOW_MATHS, 3, 50).bound == "compute"


def test_prefill_goes_in_chunks_and_wants_logits_once(model):
    steps = [StepShape(((0, 40),), 0), StepShape(((40, 40),), 0), StepShape(((80, 20),), 1)]
    moved, ops = (sum(part) for part in zip(*(work(model, shape) for shape in steps), strict=True))
    ceiling = prefill_ceiling(model, SLOW_MATHS, 100, 40)
    assert (ceiling.tokens, ceiling.ops) == (100, ops)
    assert ceiling.weight_bytes + ceiling.kv_bytes == moved
    assert ceiling.seconds == pytest.approx(ops / 1e6)


def test_one_figure_is_enough(model):
    assert not Machine().is_known
    only = decode_ceiling(model, Machine(bandwidth=1e6), 1, 9)
    assert only.bound == "memory" and only.seconds == pytest.approx(work(model, StepShape(((9, 1),), 1))[0] / 1e6)
    assert decode_ceiling(model, Machine(ops=1e6), 1, 9).bound == "compute"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["bandwidth", "ops"])
def test_figures_are_above_zero(name, value):
    with pytest.raises(ConfigError, match=name):
        Machine(**{name: value})
