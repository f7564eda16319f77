"""The reference executor in exact mode against log-probabilities that transformers computed (tests/oracle/make.py)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracle_cases import REAL_MODELS, TINY_CASES, Oracle, fingerprint
from tiny import tiny_model

from yeoul.errors import YeoulError
from yeoul.exec.protocol import ExecutorLimits
from yeoul.exec.reference import ReferenceExecutor
from yeoul.exec.reference_sampling import log_softmax
from yeoul.models.model import Model
from yeoul.models.registry import load_model
from yeoul.ops.vocabulary import Program, Rope
from yeoul.step import PlanRow, SlotState, StepPlan
from yeoul.types import RopeSpec
from yeoul.weights.catalogue import find_model
from yeoul.weights.gguf import GGUFFile

TOLERANCE = 3e-4
"""Measured: 2e-5 for tiny models, 2e-4 for the real ones, of which the largest oracle is float32."""
CHUNK = 64
BLOCK = 16


def run_in_chunks(model: Model, tokens: list[int], wanted: set[int]) -> np.ndarray:
    """Log-probabilities [len(wanted), vocab] of one sequence, computed 64 tokens at a time."""
    groups = len(model.program.kv_groups)
    blocks = -(-len(tokens) // BLOCK) + 1
    limits = ExecutorLimits(
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
        max_model_len=len(tokens),
        num_blocks=(blocks,) * groups,
        block_size=BLOCK,
    )
    executor = ReferenceExecutor(model, limits, "exact")
    out = []
    for start in range(0, len(tokens), CHUNK):
        part = tuple(tokens[start : start + CHUNK])
        new = ((tuple(range(1, blocks)),) if start == 0 else ((),)) * groups
        row = PlanRow(0, start, len(part), part, new, False, SlotState(0, 0) if start == 0 else None)
        logits = executor.logits(StepPlan(start, (row,)))
        out += [log_softmax(logits[i]).astype(np.float32) for i in range(len(part)) if start + i in wanted]
    return np.array(out)


def assert_equals_oracle(path: Path, name: str, num_tokens: int | None = None) -> None:
    """The first `num_tokens` of the oracle's text (all: None): what comes later cannot change what comes before."""
    oracle = Oracle.load(name).prefix(num_tokens)
    with GGUFFile.open(path) as file:
        model = load_model(file)
    stored = fingerprint((tensor.name, tensor.data) for tensor in model.weights.values())
    assert stored == oracle.model, "the oracle was made from another file: run `make test-oracle`"
    logprobs = run_in_chunks(model, oracle.tokens.tolist(), set(oracle.positions.tolist()))
    assert oracle.difference(logprobs) < TOLERANCE


def pulled(name: str) -> Path:
    try:
        return find_model(name)
    except YeoulError as error:
        pytest.skip(f"{error.message}; {error.hint}")


@pytest.mark.parametrize("name", TINY_CASES)
def test_tiny_model_equals_transformers(name: str, tmp_path: Path):
    case = TINY_CASES[name]
    assert_equals_oracle(tiny_model(tmp_path, case.family, **case.overrides), name)


def test_the_comparison_sees_a_wrong_rope(tmp_path: Path):
    with GGUFFile.open(tiny_model(tmp_path, "llama")) as file:
        model = load_model(file)
    ops = [_with_halves(op) if isinstance(op, Rope) else op for op in model.program.ops]
    oracle = Oracle.load("llama")
    wanted = set(oracle.positions.tolist())
    logprobs = run_in_chunks(replace(model, program=Program(tuple(ops))), oracle.tokens.tolist(), wanted)
    assert oracle.difference(logprobs) > 100 * TOLERANCE


def _with_halves(op: Rope) -> Rope:
    return replace(op, rope=RopeSpec(op.rope.head_size, op.rope.frequencies, interleaved=False))


def test_smollm2_equals_transformers():
    assert_equals_oracle(pulled("smollm2-135m"), "smollm2-135m", num_tokens=CHUNK)


@pytest.mark.models
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_file_equals_transformers(name: str):
    assert_equals_oracle(pulled(name), name)
