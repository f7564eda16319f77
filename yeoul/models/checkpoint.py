"""Checkpoint: checked access to a model file's metadata and tensors while a model file is written down as a program.

Owns every check between a hostile file and a Program: ranges of numbers, shapes of tensors, and the account of which
tensors were used. Must not know any architecture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from yeoul.errors import ModelFileError, UnsupportedModelError
from yeoul.ops.vocabulary import Segment
from yeoul.weights.tensor import Tensor


class Checkpoint:
    """One file's metadata and tensors. Keys are given without the architecture's prefix (`block_count`).

    Getters raise ModelFileError, naming the key or tensor, for anything missing, of another type or out of range.
    """

    def __init__(self, architecture: str, metadata: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        self.architecture = architecture
        self.metadata = metadata
        self.tensors = tensors
        self._used: set[str] = set()

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer of low .. high; `default` where the key is absent (None: it must be there)."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelFileError(f"{self._name(key)} must be an integer, not {value!r:.60}")
        if not low <= value <= high:
            raise ModelFileError(f"{self._name(key)} must be between {low} and {high}, not {value}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number of low .. high; `default` where the key is absent (None: it must be there)."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelFileError(f"{self._name(key)} must be a number, not {value!r:.60}")
        if not math.isfinite(value) or not low <= value <= high:
            raise ModelFileError(f"{self._name(key)} must be between {low:g} and {high:g}, not {value:g}")
        return float(value)

    def numbers(self, key: str, count: int, low: float, high: float, default: float) -> tuple[float, ...]:
        """An array of `count` finite numbers of low .. high; all `default` where the key is absent."""
        if not self.has(key):
            return (default,) * count
        value = self.metadata[self._name(key)]
        listed = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(listed, list) or len(listed) != count:
            raise ModelFileError(f"{self._name(key)} must be an array of {count} numbers")
        if not all(isinstance(item, (int, float)) and low <= item <= high for item in listed):
            raise ModelFileError(f"{self._name(key)} must hold numbers between {low:g} and {high:g}")
        return tuple(float(item) for item in listed)

    def text(self, key: str, default: str) -> str:
        """A string; `default` where the key is absent."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelFileError(f"{self._name(key)} must be a string, not {value!r:.60}")
        return value

    def has(self, key: str) -> bool:
        """Whether the file states the key."""
        return self._name(key) in self.metadata

    def refuse_unless(self, key: str, neutral: bool | int | float) -> None:
        """Raise UnsupportedModelError if the key has another value, which would change what the model computes."""
        value = self.metadata.get(self._name(key), neutral)
        if not isinstance(value, (bool, int, float)) or value != neutral:
            hint = "use another model, or a conversion without it"
            raise UnsupportedModelError(f"{self._name(key)} = {value!r:.60} is not supported", hint=hint)

    def rows(self, name: str, columns: int) -> int:
        """Row count of a matrix [rows, columns], for the sizes that only a tensor states."""
        shape = self._tensor(name).shape
        if len(shape) != 2 or shape[1] != columns:
            raise ModelFileError(f"tensor {name!r} has shape {shape}, expected (any, {columns})")
        return shape[0]

    def weight(self, name: str, *shape: int) -> str:
        """Claim a tensor that must be there with this shape; returns its name."""
        tensor = self._tensor(name)
        if tensor.shape != shape:
            raise ModelFileError(f"tensor {name!r} has shape {tensor.shape}, expected {shape}")
        self._used.add(name)
        return name

    def optional(self, name: str, *shape: int) -> str | None:
        """Claim a tensor if the file has it."""
        return self.weight(name, *shape) if name in self.tensors else None

    def segment(self, stem: str, rows: int, columns: int) -> Segment:
        """A linear layer's `stem.weight` [rows, columns], and its `stem.bias` [rows] where the file has one."""
        return Segment(self.weight(f"{stem}.weight", rows, columns), rows, self.optional(f"{stem}.bias", rows))

    def unused(self) -> tuple[str, ...]:
        """Tensors that nobody claimed, in the order of the file."""
        return tuple(name for name in self.tensors if name not in self._used)

    def _name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _get(self, key: str, default: object) -> object:
        value = self.metadata.get(self._name(key), default)
        if value is None:
            raise ModelFileError(f"the key {self._name(key)} is missing", hint="convert the model again")
        return value

    def _tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise ModelFileError(f"tensor {name!r} is missing", hint="the file is incomplete: convert the model again")
        return self.tensors[name]
