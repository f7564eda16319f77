"""What a model file recommends for sampling: read as its author wrote it; a bad value is a warning and no more."""

import logging
import math

import pytest
from tiny import tiny_model

from yeoul.config import EngineConfig
from yeoul.engine.build import build_engine
from yeoul.engine.model_defaults import read_sampling_defaults

GOOD = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}


def keys(**values):
    return {f"general.sampling.{name}": value for name, value in values.items()}


def test_a_file_that_recommends_nothing():
    assert read_sampling_defaults({"general.name": "x", "general.sampling.mirostat": 2}) == {}


def test_float32_values_are_what_the_author_wrote(tmp_path):
    model = tiny_model(tmp_path, "llama", metadata=keys(**GOOD))
    engine = build_engine(EngineConfig(model=str(model), executor="reference", max_num_seqs=1))
    found = engine.info.sampling_defaults
    engine.close()
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
    assert found == expected and isinstance(found["top_k"], int)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temp", -0.1),
        ("temp", math.nan),
        ("temp", math.inf),
        ("temp", "hot"),
        ("temp", True),
        ("temp", [0.5]),
        ("top_k", -2),
        ("top_k", 20.0),
        ("top_k", 2**40),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("penalty_repeat", 0.0),
    ],
)
def test_a_bad_value_is_a_warning_and_ignored(caplog, name, value):
    with caplog.at_level(logging.WARNING):
        found = read_sampling_defaults(keys(**{**GOOD, name: value}))
    assert len(found) == len(GOOD) - 1
    (record,) = caplog.records
    assert f"general.sampling.{name} is ignored" in record.message and len(record.message) < 200
