"""Yeoul: an LLM inference and serving engine. The public API, and nothing else; names are imported when first used."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yeoul.config import EngineConfig
    from yeoul.engine.llm import LLM, CompletionOutput, RequestOutput
    from yeoul.errors import (
        CapacityError,
        ConfigError,
        ContextLengthError,
        DownloadError,
        EngineDeadError,
        EngineError,
        ModelError,
        ModelFileError,
        ModelNotServedError,
        RequestError,
        ShuttingDownError,
        UnsupportedModelError,
        YeoulError,
    )
    from yeoul.types import FinishReason, SamplingParams, Structured, StructuredKind, TokenLogprob

__version__ = "0.1.0"

__all__ = [
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

_HOMES = MappingProxyType(
    {
        "LLM": "yeoul.engine.llm",
        "CompletionOutput": "yeoul.engine.llm",
        "RequestOutput": "yeoul.engine.llm",
        "EngineConfig": "yeoul.config",
        "FinishReason": "yeoul.types",
        "SamplingParams": "yeoul.types",
        "Structured": "yeoul.types",
        "StructuredKind": "yeoul.types",
        "TokenLogprob": "yeoul.types",
    }
)
"""Where a public name lives; the errors, which are the rest, live in yeoul.errors."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "yeoul.errors")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
