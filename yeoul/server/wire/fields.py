"""Reading the members of one JSON object, each once, each checked. Owns types and ranges of fields in general; must
not know which fields an endpoint has.

An explicit null is the same as absence. Booleans are not numbers. A float, even 5.0, is not an integer: clients that
compute a limit should find out that they compute floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from yeoul.errors import RequestError
from yeoul.server.wire.parse import show


class Fields:
    """The members of an object. Reading one removes it; `refuse_rest` refuses what nobody asked for.

    `path` is the prefix that errors put before a field's name, e.g. `messages[0].`.
    """

    def __init__(self, members: Mapping[str, Any], path: str = "") -> None:
        self._members = {name: value for name, value in members.items() if value is not None}
        self._path = path

    def take(self, name: str) -> Any:
        """The raw value, or None where the field is absent or null."""
        return self._members.pop(name, None)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in low .. high."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, f"must be an integer, got {kind(value)}")
        if not low <= value <= high:
            self.refuse(name, f"must be between {low} and {high}, got {show(value)}")
        return int(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A finite number in low .. high; integers count."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, f"must be a number, got {kind(value)}")
        if not low <= value <= high:
            self.refuse(name, f"must be between {low:g} and {high:g}, got {show(value)}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, f"must be true or false, got {kind(value)}")
        return bool(value)

    def string(self, name: str) -> str | None:
        """A string, possibly empty."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, f"must be a string, got {kind(value)}")
        return value

    def token_ids(self, name: str, vocab_size: int, most: int) -> tuple[int, ...] | None:
        """A list of at most `most` ids below `vocab_size`."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self.refuse(name, f"must be a list of token ids, got {kind(value)}")
        if len(value) > most:
            self.refuse(name, f"has {len(value)} entries; at most {most} are allowed")
        for token_id in value:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                self.refuse(name, f"must hold token ids, got {kind(token_id)}")
            if not 0 <= token_id < vocab_size:
                self.refuse(name, f"has token id {show(token_id)}; the model has 0 to {vocab_size - 1}")
        return tuple(value)

    def object(self, name: str) -> Fields | None:
        """A nested object."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, f"must be an object, got {kind(value)}")
        return self.nested(name, value)

    def nested(self, name: str, members: Mapping[str, Any]) -> Fields:
        """The reader of an object inside this one, called `name` in errors."""
        return Fields(members, f"{self._path}{name}.")

    def neutral(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Known fields that are not supported: accepted at the values that change nothing, refused at others."""
        for name in [name for name in self._members if name in allowed]:
            value = self.take(name)
            if not any(_same(value, one) for one in allowed[name]):
                self.refuse(name, f"is not supported, except at {_choices(allowed[name])}; got {show(value)}")

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that are documented to have no effect."""
        for name in names:
            self._members.pop(name, None)

    def refuse_rest(self) -> None:
        """Raises RequestError naming the first field that was not read."""
        for name in self._members:
            shown = f"{self._path}{name}"
            raise RequestError(f"unknown field {show(shown)}", param=_param(shown), hint="check it; see /docs")

    def refuse(self, name: str, what: str) -> NoReturn:
        """Raises RequestError: `name what`."""
        raise RequestError(f"{self._path}{name} {what}", param=f"{self._path}{name}")


def kind(value: object) -> str:
    """The JSON type of a value, as clients call it."""
    if isinstance(value, bool):
        return "a boolean"
    names: dict[type, str] = {int: "an integer", float: "a float", str: "a string", list: "an array", dict: "an object"}
    return names.get(type(value), "null")


def _same(value: object, neutral: object) -> bool:
    """Equal as JSON: 0 and 0.0 are one value, 0 and false are two."""
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return value == neutral


def _choices(values: tuple[Any, ...]) -> str:
    return " or ".join([show(value) for value in values] or ["null"])


def _param(name: str) -> str:
    return name.encode("ascii", "backslashreplace").decode("ascii")[:64]
