"""Rotary frequencies against the multipliers of Llama 3's scaling, worked out by hand (CASES W7)."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from oracle_cases import ROPE3_METADATA, llama3_divisors
from tiny import tiny_model

from yeoul.models.common import base_frequencies, float32, llama3_frequencies
from yeoul.models.registry import load_model
from yeoul.ops.vocabulary import Rope
from yeoul.weights.gguf import GGUFFile

LARGE = [1.0] * 15 + [0.60557, 0.30374, 0.10345] + [1 / 32] * 14
SMALL = [1.0, 0.77281, 0.13042] + [1 / 8] * 5


def frequencies(path: Path) -> tuple[float, ...]:
    program = load_model(GGUFFile.open(path)).program
    (found,) = {op.rope.frequencies for op in program.ops if isinstance(op, Rope)}
    return found


@pytest.mark.parametrize(
    ("dim", "base", "factor", "original", "expected"),
    [(64, 5e5, 32.0, 8192, LARGE), (16, 1e4, 8.0, 64, SMALL)],
)
def test_llama3_multipliers(dim: int, base: float, factor: float, original: int, expected: list[float]):
    plain = base_frequencies(base, dim)
    scaled = llama3_frequencies(plain, factor=factor, low=1.0, high=4.0, original_context=original)
    ratios = [after / before for after, before in zip(scaled, plain, strict=True)]
    assert ratios == pytest.approx(expected, abs=6e-6)


def test_tensor_and_metadata_state_the_same_scaling(tmp_path: Path):
    by_tensor = frequencies(tiny_model(tmp_path, seed=1, rope_factors=llama3_divisors(32, 1e4, 8.0, 64)))
    by_metadata = frequencies(tiny_model(tmp_path, seed=2, metadata=ROPE3_METADATA))
    plain = frequencies(tiny_model(tmp_path, seed=3))
    assert by_tensor == pytest.approx(by_metadata, rel=1e-6)
    assert by_tensor[-1] == pytest.approx(plain[-1] / 8, rel=1e-6)


def test_plain_frequencies_are_float32(tiny_paths: Mapping[str, Path]):
    found = frequencies(tiny_paths["llama"])
    assert found == float32(tuple(10000 ** (-i / 16) for i in range(16)))
    assert found != tuple(10000 ** (-i / 16) for i in range(16))


def test_partial_rotation(tmp_path: Path):
    assert len(frequencies(tiny_model(tmp_path, metadata={"llama.rope.dimension_count": 8}))) == 4


@pytest.mark.parametrize("key", ["llama.rope.scaling.factor", "llama.rope.scale_linear"])
def test_linear_scaling(tmp_path: Path, key: str):
    metadata = {key: 4.0} | ({"llama.rope.scaling.type": "linear"} if key.endswith("factor") else {})
    plain = frequencies(tiny_model(tmp_path, seed=1))
    assert frequencies(tiny_model(tmp_path, seed=2, metadata=metadata)) == pytest.approx([f / 4 for f in plain])
