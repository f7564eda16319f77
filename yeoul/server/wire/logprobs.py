"""Log-probabilities in OpenAI's two shapes. Owns the shapes; gets what tokens are from the caller, knows no tokenizer.

Chat has one entry per token, told apart by bytes. Completions has a map from text to value by nature, so a token that
is no whole character gets a label of its own, `bytes:\\xf0\\x9f`, and where two tokens share a text the higher stays.
Tokens without text, such as the one that ends a reply, are shown by name, with no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

from yeoul.types import TokenLogprob

LOWEST = -9999.0
"""JSON has no -inf: a token of probability zero gets this, as in OpenAI's API."""


class TokenTable(Protocol):
    """What tokens stand for."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text: nothing, for special tokens."""
        ...

    def token_text(self, token_id: int) -> str:
        """A token's name for people."""
        ...


def unscored(token_id: int) -> TokenLogprob:
    """The entry of a token that nothing stands before."""
    return TokenLogprob(token_id, math.nan)


def chat_logprobs(entries: Iterable[TokenLogprob], tokens: TokenTable) -> dict[str, Any]:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}, one entry per token."""
    return {"content": [_chat_entry(entry, tokens) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogprob, tokens: TokenTable) -> dict[str, Any]:
    chosen = _chat_token(entry.token_id, entry.logprob, tokens)
    chosen["top_logprobs"] = [_chat_token(token_id, logprob, tokens) for token_id, logprob in entry.top]
    return chosen


def _chat_token(token_id: int, logprob: float, tokens: TokenTable) -> dict[str, Any]:
    raw = list(tokens.token_bytes(token_id))
    return {"token": tokens.token_text(token_id), "logprob": max(logprob, LOWEST), "bytes": raw}


class CompletionLogprobs:
    """Builds the completions shape, whole or chunk by chunk: `text_offset` goes on where the last chunk ended.

    An offset is the number of characters that begin before the token, counted from the start of the text. An entry
    whose log-probability is NaN (see `unscored`) has none: null.
    """

    def __init__(self, tokens: TokenTable) -> None:
        self._tokens = tokens
        self._offset = 0

    def to_json(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        """{"tokens", "token_logprobs", "top_logprobs", "text_offset"} of the next entries of this sequence."""
        labels: list[str] = []
        offsets: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for entry in entries:
            raw = self._tokens.token_bytes(entry.token_id)
            labels.append(self._label(entry.token_id))
            offsets.append(self._offset)
            is_scored = not math.isnan(entry.logprob)
            values.append(max(entry.logprob, LOWEST) if is_scored else None)
            tops.append(self._top(entry) if is_scored else None)
            self._offset += sum(byte & 0xC0 != 0x80 for byte in raw)
        return {"tokens": labels, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one; `top` descends, so the first of two equal texts is the higher."""
        result: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            result.setdefault(self._label(token_id), max(logprob, LOWEST))
        return result

    def _label(self, token_id: int) -> str:
        raw = self._tokens.token_bytes(token_id)
        if not raw:
            return self._tokens.token_text(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
