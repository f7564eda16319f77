"""Vocabulary: the tokens of a GGUF file, their kinds and the ids with a meaning, all checked.

Owns the `tokenizer.ggml.*` keys and their defaults; must not know how text is split into tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from yeoul.errors import ModelFileError

PREFIX: Final = "tokenizer.ggml."
MAX_TOKENS: Final = 1 << 24
HINT: Final = "the file's tokenizer is damaged or incomplete; fetch or convert the model again"

END_TEXTS: Final = (
    "<|im_end|>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
)
"""Control tokens that close a turn or a document whichever id the file calls `eos`."""


class TokenKind(IntEnum):
    """What a token is for, with the numbers that GGUF gives."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """`kinds`: int32 [len(tokens)], values of TokenKind. Ids are None where the file names none."""

    tokens: Sequence[str]
    kinds: np.ndarray
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_ids: frozenset[int]
    special_ids: frozenset[int]
    """Tokens without text of their own: control, unknown and unused ones, and those that the file gives a role."""
    adds_bos: bool
    adds_eos: bool

    def __len__(self) -> int:
        return len(self.tokens)

    def texts(self, *kinds: TokenKind) -> Iterator[tuple[int, str]]:
        """(id, text) of every token of these kinds, by ascending id."""
        for token_id in np.flatnonzero(np.isin(self.kinds, kinds)).tolist():
            yield token_id, self.tokens[token_id]


def read_vocabulary(metadata: Mapping[str, object], *, adds_bos: bool) -> Vocabulary:
    """Take the vocabulary out of a file's metadata; `adds_bos` holds where the file has no `add_bos_token`.

    Raises ModelFileError for missing, mistyped or inconsistent keys.
    """
    tokens = read_strings(metadata, "tokens")
    size = len(tokens)
    if not 0 < size <= MAX_TOKENS:
        raise ModelFileError(f"{PREFIX}tokens holds {size} tokens", hint=HINT)
    kinds = _read_kinds(metadata, size)
    roles = {name: read_id(metadata, f"{name}_token_id", size) for name in ("bos", "eos", "eot", "eom")}
    control = np.isin(kinds, (TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.UNUSED))
    ends = {roles["eos"], roles["eot"], roles["eom"]} | _ids_of(END_TEXTS, tokens, kinds)
    return Vocabulary(
        tokens=tokens,
        kinds=kinds,
        bos_id=roles["bos"],
        eos_id=roles["eos"],
        unknown_id=read_id(metadata, "unknown_token_id", size),
        end_ids=frozenset(i for i in ends if i is not None),
        special_ids=frozenset(np.flatnonzero(control).tolist()) | {i for i in roles.values() if i is not None},
        adds_bos=read_flag(metadata, "add_bos_token", adds_bos) and roles["bos"] is not None,
        adds_eos=read_flag(metadata, "add_eos_token", False) and roles["eos"] is not None,
    )


def read_strings(metadata: Mapping[str, object], name: str) -> Sequence[str]:
    """An array of strings, as lazy as the reader made it. Raises ModelFileError where it is missing or another type."""
    value = metadata.get(PREFIX + name)
    if value is None:
        raise ModelFileError(f"the file has no {PREFIX}{name}", hint=HINT)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or (value and not isinstance(value[0], str)):
        raise ModelFileError(f"{PREFIX}{name} is not an array of strings", hint=HINT)
    return value


def read_numbers(metadata: Mapping[str, object], name: str, size: int, dtype: type[np.generic]) -> np.ndarray | None:
    """An array of `size` numbers as `dtype`, or None where there is none. Raises ModelFileError for anything else."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    numbers = np.asarray(value)
    if numbers.shape != (size,) or numbers.dtype.kind not in "iuf":
        raise ModelFileError(f"{PREFIX}{name} is not an array of one number for each of {size} tokens", hint=HINT)
    return numbers.astype(dtype)


def read_id(metadata: Mapping[str, object], name: str, size: int) -> int | None:
    """A token id below `size`, or None. Raises ModelFileError for one out of range."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise ModelFileError(f"{PREFIX}{name} is {value!r}, not a token id below {size}", hint=HINT)
    return value


def read_flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    """A boolean. Raises ModelFileError for another type."""
    value = metadata.get(PREFIX + name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelFileError(f"{PREFIX}{name} is {value!r}, not a boolean", hint=HINT)
    return value


def _read_kinds(metadata: Mapping[str, object], size: int) -> np.ndarray:
    kinds = read_numbers(metadata, "token_type", size, np.int32)
    if kinds is None:
        return np.full(size, TokenKind.NORMAL, np.int32)
    low, high = int(kinds.min()), int(kinds.max())
    if low < TokenKind.NORMAL or high > TokenKind.BYTE:
        bad = low if low < TokenKind.NORMAL else high
        raise ModelFileError(f"{PREFIX}token_type holds the unknown type {bad}", hint=HINT)
    return kinds


def _ids_of(texts: Sequence[str], tokens: Sequence[str], kinds: np.ndarray) -> set[int]:
    control = np.flatnonzero(kinds == TokenKind.CONTROL).tolist()
    return {i for i in control if tokens[i] in texts}
