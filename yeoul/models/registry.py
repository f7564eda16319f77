"""load_model: from an open file to a Model, by the architecture that the file names.

Owns the list of families; must not know how a file is read or how a program is run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from yeoul.errors import UnsupportedModelError
from yeoul.models.checkpoint import Checkpoint
from yeoul.models.common import kv_scales, read_spec
from yeoul.models.gemma3 import gemma3
from yeoul.models.llama import llama
from yeoul.models.model import Model
from yeoul.models.qwen2 import qwen2
from yeoul.ops.builder import Builder
from yeoul.ops.vocabulary import Program
from yeoul.types import ModelSpec
from yeoul.weights.tensor import Tensor

log = logging.getLogger(__name__)

Family = Callable[[Checkpoint, ModelSpec, Builder], Program]
FAMILIES: Mapping[str, Family] = MappingProxyType({"llama": llama, "qwen2": qwen2, "gemma3": gemma3})
"""By GGUF's `general.architecture`."""

MAX_NAMED_TENSORS = 8


class ModelFile(Protocol):
    """What a reader offers: a GGUFFile, or anything else that names tensors and keys as GGUF does."""

    @property
    def architecture(self) -> str:
        """`general.architecture`."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """Key-value pairs, keys with their prefix."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors by name."""


def load_model(file: ModelFile, *, k_dtype: str = "f16", v_dtype: str = "f16") -> Model:
    """Read the sizes, check every tensor and write the program down. Reads no weights.

    `k_dtype`, `v_dtype`: how the KV cache stores keys and values. Tensors that the model does not use are named in a
    warning. Raises UnsupportedModelError (an architecture or option that Yeoul does not have) and ModelFileError (a
    key or tensor that is missing, out of range or of another shape).
    """
    family = FAMILIES.get(file.architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedModelError(
            f"the architecture {file.architecture!r:.60} is not supported", hint=f"Yeoul runs {known}"
        )
    checkpoint = Checkpoint(file.architecture, file.metadata, file.tensors)
    spec = read_spec(checkpoint)
    program = family(checkpoint, spec, Builder(k_dtype, v_dtype, kv_scales(checkpoint, spec)))
    _report(checkpoint.unused())
    return Model(spec, program, file.tensors, file.metadata)


def _report(unused: tuple[str, ...]) -> None:
    if not unused:
        return
    named = ", ".join(unused[:MAX_NAMED_TENSORS])
    rest = f" and {len(unused) - MAX_NAMED_TENSORS} more" if len(unused) > MAX_NAMED_TENSORS else ""
    log.warning("the model file holds %d tensors that the model does not use: %s%s", len(unused), named, rest)
