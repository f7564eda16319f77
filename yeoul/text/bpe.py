"""Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019), through the `tokenizers` library.

Owns the byte alphabet and the published pre-tokenizer splits by their GGUF names. Must not know special-token rules
beyond cutting their texts out of the input.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Final

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Pipeline
from tokenizers.models import BPE

from yeoul.errors import ModelFileError, UnsupportedModelError
from yeoul.text.tokenizer import Tokenizer
from yeoul.text.vocabulary import HINT, PREFIX, TokenKind, Vocabulary, read_strings, read_vocabulary

logger = logging.getLogger(__name__)

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UNNAMED: Final = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is cut before merging: each regular expression in turn isolates its matches in what is left."""

    splits: tuple[str, ...]
    single_digits: bool = False
    """Before all else, each numeric character is a piece of its own."""
    nfc: bool = False
    """Normalize to Unicode form C first."""
    ignore_merges: bool = False
    """A piece that is a token as a whole is that token, whatever merging would give."""
    adds_bos: bool = False
    """Where the file does not say."""


PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = MappingProxyType(
    {
        "smollm": PreTokenizer((_GPT2_WORDS,), single_digits=True),
        # The published tokenizer normalizes, which a GGUF file has no key for.
        "qwen2": PreTokenizer((_WORDS % "",), nfc=True),
        "llama-bpe": PreTokenizer((_WORDS % "{1,3}",), ignore_merges=True, adds_bos=True),
        "gpt-2": PreTokenizer((_GPT2_WORDS,)),
        # What files without a better name have always been read with.
        "default": PreTokenizer(_UNNAMED),
    }
)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where it is printable Latin-1, else U+0100 onwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}


_NEVER_IN_UTF8: Final = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
_TO_LATIN1: Final[Mapping[int, int]] = MappingProxyType({ord(char): byte for byte, char in _byte_alphabet().items()})


class BPETokenizer(Tokenizer):
    """Byte-level BPE over a GGUF vocabulary."""

    def __init__(self, vocabulary: Vocabulary, pipeline: Pipeline, *, nfc: bool) -> None:
        super().__init__(vocabulary)
        self._pipeline = pipeline
        self._nfc = nfc
        user_defined = dict(vocabulary.texts(TokenKind.USER_DEFINED))
        control = dict(vocabulary.texts(TokenKind.CONTROL, TokenKind.UNKNOWN))
        self._literals = {text: token_id for token_id, text in (user_defined | control).items()}
        self._user_defined = _literal_pattern(user_defined.values())
        self._all_literals = _literal_pattern(chain(user_defined.values(), control.values()))

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for piece, token_id in self._cut(text, self._all_literals if parse_special else self._user_defined):
            if token_id is not None:
                ids.append(token_id)
            elif piece:
                normal = unicodedata.normalize("NFC", piece) if self._nfc else piece
                # The batch form, unlike the plain one, releases the GIL: a long prompt must not stop the engine.
                ids.extend(self._pipeline.encode_batch_fast([normal], add_special_tokens=False)[0].ids)
        return ids

    def _cut(self, text: str, pattern: re.Pattern[str] | None) -> Iterator[tuple[str, int | None]]:
        start = 0
        for match in pattern.finditer(text) if pattern else ():
            yield text[start : match.start()], None
            yield match[0], self._literals[match[0]]
            start = match.end()
        yield text[start:], None

    def _bytes(self, token_id: int) -> bytes:
        name = self._name(token_id)
        if self._kind(token_id) == TokenKind.USER_DEFINED:
            return name.encode()
        try:
            return name.translate(_TO_LATIN1).encode("latin-1")
        except UnicodeEncodeError:  # not written in the byte alphabet: a text as it stands
            return name.encode()


def load_bpe(metadata: Mapping[str, object]) -> BPETokenizer:
    """Build from GGUF metadata. Raises ModelFileError and UnsupportedModelError as `load_tokenizer` does."""
    rules = _rules(metadata.get(PREFIX + "pre"))
    vocabulary = read_vocabulary(metadata, adds_bos=rules.adds_bos)
    pipeline = Pipeline(_model(vocabulary, read_strings(metadata, "merges"), rules))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(_stages(rules))
    return BPETokenizer(vocabulary, pipeline, nfc=rules.nfc)


def _stages(rules: PreTokenizer) -> list[pre_tokenizers.PreTokenizer]:
    digits = [pre_tokenizers.Digits(individual_digits=True)] if rules.single_digits else []
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.splits]
    return [*digits, *splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _rules(name: object) -> PreTokenizer:
    if name is None:
        logger.warning(
            "the file does not name its pre-tokenizer (%spre); text is split by the default rules, which may cost "
            "quality: a newer conversion of the model would name it",
            PREFIX,
        )
        name = "default"
    rules = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rules is None:
        hint = f"supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        raise UnsupportedModelError(f"pre-tokenizer {name!r} ({PREFIX}pre) is not supported", hint=hint)
    return rules


def _model(vocabulary: Vocabulary, merges: Sequence[str], rules: PreTokenizer) -> BPE:
    tokens = {text: token_id for token_id, text in enumerate(vocabulary.tokens)}
    # Merging must never build a special token out of a user's text.
    for _, text in vocabulary.texts(TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.UNUSED):
        tokens.pop(text, None)
    missing = [byte for byte, char in _byte_alphabet().items() if char not in tokens and byte not in _NEVER_IN_UTF8]
    if missing:
        # The published tokenizers do the same, and equal ids matter more than a rare control character.
        names = ", ".join(f"0x{byte:02X}" for byte in missing)
        logger.info("the vocabulary has no token for the bytes %s; encoding leaves them out", names)
    try:
        return BPE(tokens, _split_merges(merges), ignore_merges=rules.ignore_merges)
    except Exception as error:  # the library raises plain Exception, naming the merge
        raise ModelFileError(f"{PREFIX}merges does not fit the vocabulary: {error}", hint=HINT) from None


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if set(map(len, pairs)) - {2}:
        bad = next(i for i, pair in enumerate(pairs) if len(pair) != 2)
        raise ModelFileError(f"{PREFIX}merges: entry {bad} is not two tokens", hint=HINT)
    return pairs  # type: ignore[return-value]  # the lengths were just checked


def _literal_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the texts, the longest first."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
