"""CallObject: one tool call as a JSON object, `{"name": ..., "arguments": {...}}`, read piece by piece.

Owns where its name and arguments begin and end. Must not know what surrounds it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from yeoul.server.replies.part import CallDelta

MAX_HEADER = 1024
"""Characters in which name and arguments must begin, for the arguments to be told while they come."""
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class CallObject:
    """Push text until `complete` or `broken`.

    Where the object begins with its name, the arguments are told as they come, exactly as the model wrote them;
    otherwise it is told as a whole at its end. `broken`: it is no call, and nothing was told; `raw` has its text.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self.raw = ""
        self.complete = False
        self.broken = False
        self.told = False
        """The call's name has been told: from here on it is a call."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._members_end: list[int] = []
        """Where, in `raw`, values that are objects or lists themselves ended."""
        self._arguments_start = 0
        self._num_told = 0

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        """(what became known of the call, the text that follows the object)."""
        taken = self._advance(text)
        self.raw += text[:taken]
        if not self.told and not self.broken:
            self._read_header()
        if self.told:
            return self._more_arguments(), text[taken:]
        return (self._whole() if self.complete else []), text[taken:]

    def _advance(self, text: str) -> int:
        """Follow strings and brackets; how many characters belong to the object."""
        for position, char in enumerate(text):
            if self._in_string:
                self._step_in_string(char)
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 1:
                    self._members_end.append(len(self.raw) + position + 1)
            if self._depth <= 0 and not char.isspace():
                self.complete, self.broken = char == "}" and self._depth == 0, char != "}" or self._depth < 0
                return position + (1 if self.complete else 0)
        return len(text)

    def _step_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _read_header(self) -> None:
        match = _HEADER.match(self.raw, 0, MAX_HEADER)
        name = _load(match[1]) if match else None
        if match and isinstance(name, str):
            self.told = True
            self._name = name
            self._arguments_start = match.end()

    def _more_arguments(self) -> list[CallDelta]:
        end = next((end for end in self._members_end if end > self._arguments_start), len(self.raw))
        start = self._arguments_start + self._num_told
        name = self._name if not self._num_told else None
        if start >= end:
            return []
        self._num_told = end - self._arguments_start
        return [CallDelta(self._index, name, self.raw[start:end])]

    def _whole(self) -> list[CallDelta]:
        value = _load(self.raw)
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            self.broken = True
            return []
        self.told = True
        return [CallDelta(self._index, name, json.dumps(arguments, ensure_ascii=False))]


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
