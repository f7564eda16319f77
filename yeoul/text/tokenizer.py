"""Tokenizer: text to token ids and back, as a GGUF file describes it.

Owns what all kinds of tokenizers share: beginning- and end-of-sequence tokens, limits, which ids are special. How a
plain text is split is the subclasses' (`bpe`, `sentencepiece`). Must not know models, requests or templates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Final

from yeoul.errors import ModelFileError, RequestError, UnsupportedModelError
from yeoul.text.controls import ControlTexts
from yeoul.text.vocabulary import HINT, PREFIX, TokenKind, Vocabulary

MAX_TEXT_BYTES: Final = 1 << 24
"""Longest text that is encoded at all, UTF-8; servers refuse far shorter ones first."""


class Tokenizer(ABC):
    """The same input gives the same output for ever; any thread may call any method.

    `end_ids`: tokens at which generation ends (end of sequence, turn or message). `adds_bos`: whether `encode` starts
    with `bos_id`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.vocab_size = len(vocabulary)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.end_ids = vocabulary.end_ids
        self.adds_bos = vocabulary.adds_bos
        self.adds_eos = vocabulary.adds_eos
        self._known: dict[int, bytes] = {}  # bytes of tokens seen so far: at most one entry for each token

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text.

        `add_special`: begin and end with BOS and EOS where the file says so, each once. `parse_special`: texts of
        control tokens become those tokens, which a user's own text must not do. User-defined tokens always match.
        Raises RequestError for a text that is too long or is not Unicode (a lone surrogate).
        """
        _check_text(text)
        ids = self._encode(text, parse_special)
        if not add_special:
            return ids
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if self.adds_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids

    @cached_property
    def controls(self) -> ControlTexts:
        """The control tokens by their texts."""
        texts = self._vocabulary.texts(TokenKind.CONTROL, TokenKind.UNKNOWN)
        return ControlTexts({text: token_id for token_id, text in texts})

    def encode_chat(self, rendered: str, stand_ins: Mapping[int, str] | None = None) -> list[int]:
        """Ids of a chat template's output, with BOS once where the tokenizer adds it, whether the template did or not.

        `stand_ins`: from `controls.hide`, to be put back. No EOS: the reply comes next. Raises what `encode` raises.
        """
        if stand_ins:
            _check_text(rendered)
            ids = self._encode_hidden(rendered, stand_ins)
        else:
            ids = self.encode(rendered, add_special=False, parse_special=True)
        if self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _encode_hidden(self, rendered: str, stand_ins: Mapping[int, str]) -> list[int]:
        ids: list[int] = []
        for piece, control_id in self.controls.cut(rendered):
            ids.extend(self._encode(piece.translate(stand_ins), False))
            if control_id is not None:
                ids.append(control_id)
        return ids

    def is_special(self, token_id: int) -> bool:
        """Whether a token has no text of its own: control tokens and the like. User-defined tokens are text."""
        return token_id in self._vocabulary.special_ids

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The exact bytes that a token stands for; not always whole characters.

        Special tokens are empty, or their names with `skip_special` False. Raises RequestError for an id that is not
        in the vocabulary.
        """
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return b"" if skip_special and token_id in self._vocabulary.special_ids else known

    def token_text(self, token_id: int) -> str:
        """A token's name for people: special tokens by name, bytes that are no character as U+FFFD."""
        return self.token_bytes(token_id, skip_special=False).decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence, the inverse of `encode`; bytes that are no character become U+FFFD."""
        data = b"".join(self.token_bytes(token_id, skip_special=skip_special) for token_id in ids)
        return self._trim(data).decode("utf-8", "replace")

    def _look_up(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is not in the vocabulary (0 to {self.vocab_size - 1})")
        return self._name(token_id).encode() if self.is_special(token_id) else self._bytes(token_id)

    @abstractmethod
    def _encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of a checked text, without BOS and EOS."""

    @abstractmethod
    def _bytes(self, token_id: int) -> bytes:
        """Bytes of a token of the vocabulary that is not special."""

    def _trim(self, data: bytes) -> bytes:
        """Take back what encoding put before the text."""
        return data

    def _name(self, token_id: int) -> str:
        return self._vocabulary.tokens[token_id]

    def _kind(self, token_id: int) -> int:
        return int(self._vocabulary.kinds[token_id])


def load_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises ModelFileError for a damaged description and UnsupportedModelError for a kind of tokenizer, or a
    pre-tokenizer, that Yeoul does not have.
    """
    # Imported here: each pulls in its own library, and a model needs one of them.
    model = metadata.get(PREFIX + "model")
    if model == "gpt2":
        from yeoul.text.bpe import load_bpe

        return load_bpe(metadata)
    if model == "llama":
        from yeoul.text.sentencepiece import load_sentencepiece

        return load_sentencepiece(metadata)
    if model is None:
        raise ModelFileError(f"the file has no tokenizer ({PREFIX}model is missing)", hint=HINT)
    raise UnsupportedModelError(f"tokenizer model {model!r} is not supported", hint="supported: gpt2, llama")


def _check_text(text: str) -> None:
    try:
        size = len(text) if text.isascii() else len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: a lone surrogate at character {error.start}",
            hint="escape characters above U+FFFF as a pair, or send UTF-8",
        ) from None
    if size > MAX_TEXT_BYTES:
        raise RequestError(f"the text has {size} bytes; at most {MAX_TEXT_BYTES} are encoded")


__all__ = ["MAX_TEXT_BYTES", "TokenKind", "Tokenizer", "load_tokenizer"]
