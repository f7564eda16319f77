"""SentencePiece-style tokenizers (GGUF's `llama` model: Llama 2, Mistral, Gemma), encoded by the native SpmEncoder.

Owns how such a vocabulary maps to bytes and the rule of the space before a text; the merging itself is native.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np

from yeoul._native import SpmEncoder
from yeoul.errors import ModelFileError
from yeoul.text.tokenizer import Tokenizer
from yeoul.text.vocabulary import HINT, PREFIX, TokenKind, Vocabulary, read_flag, read_numbers, read_vocabulary

SPACE: Final = "\u2581"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class SentencePieceTokenizer(Tokenizer):
    """Scores and byte fallback. `space_prefix`: a space goes before a text, and before what follows a control token.

    Decoding a whole sequence takes the first space away again; a continuation (OutputText) keeps it.
    """

    def __init__(self, vocabulary: Vocabulary, encoder: SpmEncoder, *, space_prefix: bool) -> None:
        super().__init__(vocabulary)
        self._encoder = encoder
        self._space_prefix = space_prefix

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        return self._encoder.encode(text.encode(), parse_special, self._space_prefix)

    def _bytes(self, token_id: int) -> bytes:
        name = self._name(token_id)
        if self._kind(token_id) == TokenKind.BYTE and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes((int(match[1], 16),))
        return name.replace(SPACE, " ").encode()

    def _trim(self, data: bytes) -> bytes:
        return data.removeprefix(b" ") if self._space_prefix else data


def load_sentencepiece(metadata: Mapping[str, object]) -> SentencePieceTokenizer:
    """Build from GGUF metadata. Raises ModelFileError as `load_tokenizer` does."""
    vocabulary = read_vocabulary(metadata, adds_bos=True)
    scores = read_numbers(metadata, "scores", len(vocabulary), np.float32)
    if scores is None:
        raise ModelFileError(f"the file has no {PREFIX}scores", hint=HINT)
    unknown = -1 if vocabulary.unknown_id is None else vocabulary.unknown_id
    try:
        encoder = SpmEncoder(list(vocabulary.tokens), scores.tolist(), vocabulary.kinds.tolist(), unknown)
    except ValueError as error:
        raise ModelFileError(f"the file's tokenizer cannot be used: {error}", hint=HINT) from None
    return SentencePieceTokenizer(vocabulary, encoder, space_prefix=read_flag(metadata, "add_space_prefix", True))
