"""ControlTexts: the texts of control tokens, hidden where a client wrote them and recognized where a template did.

A chat template mixes its own control tokens with strings of the client. To tell them apart after rendering, the first
character of every control text inside a client's string is replaced, before rendering, by a stand-in: a character that
occurs neither in those strings nor in the template. Lengths stay the same and ordinary strings are not touched at all,
so templates render as they always do. Once the rendered text has been cut at its control texts, the stand-ins are put
back. Owns this exchange; must not know templates or how plain text is encoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

STAND_INS: Final = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Noncharacters, then private use: what texts hold least often."""


class ControlTexts:
    """`ids`: the id of every control token by its text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: token_id for text, token_id in ids.items() if text}
        ordered = sorted(self._ids, key=len, reverse=True)
        choice = "|".join(map(re.escape, ordered))
        self._literal = re.compile(choice) if ordered else None
        # Looking ahead, so that texts which overlap are all found: breaking one must not leave another whole.
        self._start = re.compile(f"(?=(?:{choice})).", re.DOTALL) if ordered else None

    def hide(self, value: Any, avoid: str) -> tuple[Any, dict[int, str]]:
        """(the value with control texts hidden in all its strings, what `str.translate` needs to put them back).

        `value`: strings in any nesting of dictionaries and lists. `avoid`: a text whose characters are no stand-ins.
        Nothing to hide: the value itself and an empty dictionary.
        """
        literal, start = self._literal, self._start
        strings = list(_strings(value))
        if literal is None or start is None or not any(map(literal.search, strings)):
            return value, {}
        taken = set(avoid).union(*strings)
        free = (code for code in chain(*STAND_INS) if chr(code) not in taken)
        firsts = {char for text in strings for char in start.findall(text)}
        stand_ins = dict(zip(sorted(firsts), free, strict=False))

        def replace(text: str) -> str:
            return start.sub(lambda match: chr(stand_ins[match[0]]), text)

        return _map(value, replace), {code: char for char, code in stand_ins.items()}

    def cut(self, text: str) -> Iterator[tuple[str, int | None]]:
        """The text as pieces, each with the id of the control token that follows it (None after the last)."""
        start = 0
        for match in self._literal.finditer(text) if self._literal is not None else ():
            yield text[start : match.start()], self._ids[match[0]]
            start = match.end()
        yield text[start:], None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _strings(key)
            yield from _strings(member)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _map(value: Any, replace: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {_map(key, replace): _map(member, replace) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, replace) for item in value]
    return value
