"""Qwen2 and Qwen2.5: Llama's wiring with biases on q, k and v, and rotary halves instead of interleaved pairs.

Owns this architecture's facts; must not know how ops run.
"""

from __future__ import annotations

from yeoul.errors import ModelFileError
from yeoul.models.checkpoint import Checkpoint
from yeoul.models.common import rope_spec
from yeoul.models.llama import decoder
from yeoul.ops.builder import Builder
from yeoul.ops.vocabulary import Program
from yeoul.types import ModelSpec


def qwen2(file: Checkpoint, spec: ModelSpec, b: Builder) -> Program:
    """The decoder of a `qwen2` file. Raises ModelFileError for a tensor that is missing or of another shape.

    Every Qwen2 has the three biases; a file without them was damaged in conversion and would answer nonsense.
    """
    for layer in range(spec.num_layers):
        for name in ("attn_q", "attn_k", "attn_v"):
            if f"blk.{layer}.{name}.bias" not in file.tensors:
                raise ModelFileError(f"tensor 'blk.{layer}.{name}.bias' is missing", hint="convert the model again")
    return decoder(file, spec, b, rope_spec(file, spec, interleaved=False))
