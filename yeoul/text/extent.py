"""How large the values of a template are, and would become: pure arithmetic for the sandbox.

Owns the bounds on sizes; must not know jinja2's syntax tree or how steps are counted.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, KeysView, Mapping, Sequence, ValuesView
from typing import Any, Final

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_SIZE: Final = 1 << 22
"""Characters of a string, or items of a list, that a template may build."""
MAX_NODES: Final = 1 << 19
"""Items of a nested value, counted as often as they would print, at 64 characters to an item."""
MAX_WIDTH: Final = 1000
"""Widths and counts given to filters and methods that pad or group."""
MAX_BITS: Final = 4096
CHARS_PER_STEP: Final = 64
ITEMS_PER_STEP: Final = 8

_WIDTH_FILTERS: Final = frozenset(("center", "indent", "wordwrap", "truncate", "batch", "slice", "urlize", "round"))
_WIDTH_METHODS: Final = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs"))
_FORMATS: Final = frozenset(("format", "format_map"))
_WIDE: Final = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d{4,}|\*)|\.(\d{4,}|\*)|:[^{}]*(\d{4,}|\{)")


def extent(value: object) -> int:
    """About how many characters a value prints as. Raises SecurityError for more than MAX_NODES items.

    Text counts exactly; a list's items cost 64 each, more where they are deep inside it, so that indented JSON stays
    within the estimate.
    """
    if isinstance(value, (str, bytes)):
        return len(value)
    total = 0
    stack: list[tuple[object, int]] = [(value, 0)]
    while stack:
        top, depth = stack.pop()
        total += 1 + depth // 4
        if isinstance(top, (str, bytes)):
            total += len(top) // CHARS_PER_STEP
        elif isinstance(top, Namespace):
            raise SecurityError("a namespace is not a value to print or compare")
        else:
            stack.extend((item, depth + 1) for item in _items(top))
        if total + len(stack) > MAX_NODES:
            raise too_large()
    return total * CHARS_PER_STEP if _items(value) else total


def result_steps(value: object) -> int:
    """Steps that a new value costs. Raises SecurityError for one beyond the bounds."""
    if isinstance(value, (str, bytes)):
        _limit(len(value), MAX_SIZE)
        return len(value) // CHARS_PER_STEP
    if isinstance(value, (list, tuple, dict)):
        _limit(len(value), MAX_SIZE)
        return len(value) // ITEMS_PER_STEP
    _limit(_bits(value), MAX_BITS)
    return 0


def check_binop(operator: str, left: object, right: object) -> None:
    """Raises SecurityError where `left operator right` would be huge."""
    if operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(count, int):
                _limit(len(sequence) * count, MAX_SIZE)
    elif operator == "**" and isinstance(right, int):
        _limit(_bits(left) * abs(right), MAX_BITS)
    elif operator == "%" and isinstance(left, (str, bytes)):
        _check_format(left, (right,))


def check_method(name: str, subject: str | bytes, args: Sequence[Any]) -> None:
    """Raises SecurityError where a string's method would build something huge."""
    if name in _WIDTH_METHODS:
        _check_width(len(subject), args)
    elif name in _FORMATS:
        _check_format(subject, args)
    elif name == "replace":
        _limit(_replaced(subject, args), MAX_SIZE)
    elif name == "join":
        _limit(sum(extent(value) for value in args) * (1 + len(subject)), MAX_SIZE * CHARS_PER_STEP)


def check_filter(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The same for a filter; `args` begins with the value that is filtered."""
    options = (*args[1:], *kwargs.values())
    value = args[0] if args else None
    if name in _WIDTH_FILTERS:
        _check_width(extent(value), options)
    elif name == "tojson":
        _limit(max((_width(option) for option in options), default=0), 16)
    elif name == "format":
        _check_format(value if isinstance(value, (str, bytes)) else "", options)
    elif name == "replace":
        _limit(_replaced(value, options), MAX_SIZE)
    elif name == "join":
        _limit(extent(value) * (1 + sum(map(extent, options))), MAX_SIZE * CHARS_PER_STEP)


def too_large() -> SecurityError:
    """What every bound on sizes raises."""
    return SecurityError("it builds a value that is too large")


def _items(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, (list, tuple, set, KeysView, ValuesView, ItemsView)) else []


def _check_width(size: int, options: Sequence[Any]) -> None:
    width = max((_width(option) for option in options), default=0)
    _limit(width, MAX_WIDTH)
    _limit((1 + size) * (1 + width), MAX_SIZE * CHARS_PER_STEP)


def _width(option: object) -> int:
    """The spaces or characters that an option may insert at every place."""
    return abs(option) if isinstance(option, int) else len(option) if isinstance(option, (str, bytes, tuple)) else 0


def _replaced(value: object, options: Sequence[Any]) -> int:
    """Length of value.replace(old, new): exact for texts, an upper bound for what first becomes one."""
    old, new = (*options[:2], "", "")[:2]
    size = extent(value)
    same = isinstance(value, str) and isinstance(old, str)
    times = value.count(old) if same else size + 1  # type: ignore[attr-defined]  # `same` says it is a str
    return size + times * extent(new)


def _check_format(text: str | bytes, values: Sequence[Any]) -> None:
    if _WIDE.search(text if isinstance(text, str) else text.decode("latin-1")):
        raise SecurityError(f"a format string asks for a width of {MAX_WIDTH} or more, or for one that is computed")
    # A value may be named as often as the text has room for, each time with a width below the bound.
    _limit((1 + _places(text)) * MAX_WIDTH, MAX_SIZE)
    _limit((1 + len(text)) * (1 + sum(map(extent, values))), MAX_SIZE * CHARS_PER_STEP)


def _places(text: str | bytes) -> int:
    return text.count("%") + text.count("{") if isinstance(text, str) else text.count(b"%")


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _limit(size: int, limit: int) -> None:
    if size > limit:
        raise too_large()
