"""Fixtures that every room's tests share: tiny models as files, written once per session."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tiny import FAMILIES, tiny_model


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "models: runs a real model other than SmolLM2, for minutes (make test-models)")


@pytest.fixture(scope="session")
def tiny_paths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The preset model of each family, by family name."""
    folder = tmp_path_factory.mktemp("tiny")
    return {family: tiny_model(folder, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def tiny_llama(tiny_paths: Mapping[str, Path]) -> Path:
    return tiny_paths["llama"]


@pytest.fixture(scope="session")
def tiny_qwen2(tiny_paths: Mapping[str, Path]) -> Path:
    return tiny_paths["qwen2"]


@pytest.fixture(scope="session")
def tiny_gemma3(tiny_paths: Mapping[str, Path]) -> Path:
    return tiny_paths["gemma3"]
