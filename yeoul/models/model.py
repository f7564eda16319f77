"""Model: a loaded model, ready for any executor. Owns nothing but the four parts; must not know how they are run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from yeoul.ops.vocabulary import Program
from yeoul.types import ModelSpec
from yeoul.weights.tensor import Tensor


@dataclass(frozen=True)
class Model:
    """`weights` are named as in the file and stay mapped as long as this object lives."""

    spec: ModelSpec
    program: Program
    weights: Mapping[str, Tensor]
    metadata: Mapping[str, object]
    """The file's key-value pairs (tokenizer, chat template, ...)."""

    @property
    def has_key_bias(self) -> bool:
        """Is a bias added to the keys of some layer?"""
        return any(name.endswith(".attn_k.bias") for name in self.weights)
