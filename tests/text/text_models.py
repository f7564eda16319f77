"""Tokenizers for the tests of this room: of the real models, and small ones made by hand."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from yeoul.errors import YeoulError
from yeoul.text.tokenizer import Tokenizer, load_tokenizer
from yeoul.weights.catalogue import find_model
from yeoul.weights.gguf import GGUFFile

DATA = Path(__file__).parent / "data"
DEFAULT_MODEL = "smollm2-135m"
PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def read_data(name: str) -> list[dict]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


@functools.cache
def metadata_of(name: str) -> dict[str, object]:
    """A real model's metadata. The default model must be there; for the others the test is skipped."""
    try:
        path = find_model(name)
    except YeoulError as error:
        if name == DEFAULT_MODEL:
            raise
        pytest.skip(f"{name}: {error}")
    return dict(GGUFFile.open(path).metadata)


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    return load_tokenizer(metadata_of(name))


def keys(**values: object) -> dict[str, object]:
    """GGUF keys; a value of None leaves the key out."""
    return {PREFIX + name: value for name, value in values.items() if value is not None}


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte, written independently of the package: printable ones stand for themselves."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    names, spare = [], 0x100
    for byte in range(256):
        names.append(chr(byte) if byte in visible else chr(spare))
        spare += byte not in visible
    return names


def bpe_keys(merges: Sequence[str] | None = (), **changes: object) -> dict[str, object]:
    """A byte-level vocabulary: 256 bytes, the merges' results, <s>, </s>, <|im_end|> and the user-defined <tool>."""
    tokens = byte_alphabet() + [merge.replace(" ", "") for merge in merges or ()]
    special = ["<s>", "</s>", "<|im_end|>", "<tool>"]
    types = [NORMAL] * len(tokens) + [CONTROL, CONTROL, CONTROL, USER_DEFINED]
    base = len(tokens)
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens + special, "token_type": types, "merges": merges}
    values |= {"bos_token_id": base, "eos_token_id": base + 1, "add_bos_token": True}
    return keys(**(values | changes))


def spm_keys(pieces: dict[str, float] | None = None, **changes: object) -> dict[str, object]:
    """<unk>, <s>, </s>, 256 byte tokens, the user-defined <tool>, then a space and `pieces` with their scores."""
    pieces = {"\u2581": -1.0} | (pieces or {})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tool>", *pieces]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [USER_DEFINED] + [NORMAL] * len(pieces)
    values = {"model": "llama", "tokens": tokens, "token_type": types}
    values |= {"scores": [0.0] * 260 + list(pieces.values()), "unknown_token_id": 0, "bos_token_id": 1}
    return keys(**(values | {"eos_token_id": 2, "add_space_prefix": False} | changes))
