"""OutputText: the text of one generated sequence, released piece by piece, and the end of it at a stop string.

A pure state machine: owns bytes that are half a character and characters that may become a stop string. Must not know
how tokens were made, nor requests, time or any other sequence.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from yeoul.text.tokenizer import Tokenizer


class OutputText:
    """Feed token ids to `push`, send what it returns, call `finish` at the end: the joined deltas are the whole text.

    The text does not depend on how the tokens were split over the calls. It ends before the first stop string to be
    complete (with `include_stop`: after it), reading character by character; of several complete at the same character
    the longest is taken, so that the least text goes out. Characters that the first `num_unmatched` tokens complete
    are no part of any stop string. A call costs time proportional to its own tokens (and the stop strings), never to
    what came before.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special: bool = True,
        *,
        num_unmatched: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_unmatched = num_unmatched
        self._include_stop = include_stop
        self._held = ""
        self._stopped: str | None = None

    @property
    def stopped(self) -> bool:
        """A stop string is complete: what follows it is dropped and the sequence may end."""
        return self._stopped is not None

    @property
    def stop_string(self) -> str | None:
        """Which stop string ended the text."""
        return self._stopped

    @property
    def held(self) -> int:
        """Characters that wait because they may begin a stop string."""
        return len(self._held)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that may be sent now. Raises RequestError for an id outside the vocabulary."""
        token_ids = list(token_ids)
        early, late = token_ids[: self._num_unmatched], token_ids[self._num_unmatched :]
        self._num_unmatched -= len(early)
        text = self._decoder.decode(self._bytes(early))
        return text + self._release(self._decoder.decode(self._bytes(late)))

    def finish(self) -> str:
        """What was held back; bytes that never became a character are U+FFFD. Empty after a stop string.

        The end of the text completes no stop string but one that contains U+FFFD itself.
        """
        delta = self._release(self._decoder.decode(b"", final=True))
        delta, self._held = delta + self._held, ""
        return delta

    def _bytes(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(self._tokenizer.token_bytes(i, skip_special=self._skip_special) for i in token_ids)

    def _release(self, text: str) -> str:
        """Take in new characters; return those that no stop string can claim any more."""
        if self.stopped:
            return ""
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, self._stopped = match
            self._held = ""
            return text[: start + len(self._stopped)] if self._include_stop else text[:start]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """(start, stop string) of the match that ends first; among those that end together, the longest."""
        found = ((text.find(stop), stop) for stop in self._stop)
        return min(((start, stop) for start, stop in found if start >= 0), key=_end_then_start, default=None)

    def _possible_start(self, text: str) -> int:
        """Where the longest end of `text` begins that a stop string begins with; len(text) if none does."""
        return min((_overlap(text, stop) for stop in self._stop), default=len(text))


def _end_then_start(match: tuple[int, str]) -> tuple[int, int]:
    start, stop = match
    return start + len(stop), start


def _overlap(text: str, stop: str) -> int:
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)
