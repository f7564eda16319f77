"""Bad words as token sequences. Owns which sequences stand for a word; must not know sampling or requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text."""
        ...


def bad_word_ids(encoder: Encoder, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences of every word, as it is and after a space, each once.

    A text has other tokenizations too, which a model hardly ever writes; those are not banned. Raises RequestError for
    a word that is not Unicode.
    """
    spelled = [spelling for word in words for spelling in (word, " " + word.lstrip(" "))]
    found = [tuple(encoder.encode(spelling, add_special=False)) for spelling in spelled]
    return tuple(dict.fromkeys(ids for ids in found if ids))
