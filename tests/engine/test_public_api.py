"""The public names, and that importing them costs nothing."""

import subprocess
import sys

import pytest

import yeoul

NAMES = [
    "LLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "DownloadError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "FinishReason",
    "ModelError",
    "ModelFileError",
    "ModelNotServedError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ShuttingDownError",
    "Structured",
    "StructuredKind",
    "TokenLogprob",
    "UnsupportedModelError",
    "YeoulError",
]


def test_all_is_pinned_and_every_name_resolves():
    assert yeoul.__all__ == NAMES
    for name in NAMES:
        assert getattr(yeoul, name).__name__ == name
    assert set(NAMES) <= set(dir(yeoul))


def test_every_error_is_public():
    from yeoul import errors

    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds <= set(NAMES)


def test_other_names_do_not_exist():
    with pytest.raises(AttributeError, match="no attribute 'torch'"):
        _ = yeoul.torch


def loaded_by(statement):
    code = f"{statement}; import sys; print(' '.join(sys.modules))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def test_import_is_lazy():
    modules = loaded_by("import yeoul")
    assert not {"numpy", "msgspec", "asyncio", "yeoul.engine.llm"} & set(modules)
    assert "numpy" not in loaded_by("from yeoul import LLM, SamplingParams, EngineConfig")


def test_scheduler_and_kv_import_no_numerics():
    modules = loaded_by("import yeoul.sched.scheduler, yeoul.kv.sizing, yeoul.kv.manager")
    assert not [
        name for name in modules if name.startswith(("numpy", "torch", "yeoul.exec", "yeoul.server", "yeoul.engine"))
    ]
