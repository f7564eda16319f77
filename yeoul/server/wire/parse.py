"""From bytes to one JSON object, checked more strictly than JSON libraries do. Owns syntax; must not know fields.

Refused, each as a RequestError (400): bad UTF-8, text that is not JSON, NaN and Infinity (and numbers that overflow to
them), integers of thousands of digits, duplicate keys, more than 32 levels, lone surrogates, a top level that is not an
object. All checks are linear in the body's length.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from yeoul.errors import RequestError

MAX_DEPTH = 32

# An unterminated string runs to the end, so that no second match starts inside it (which would be quadratic).
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_ONE_BRACKET = bytes.maketrans(b"{}", b"[]")


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode a request body. Raises RequestError with one line for the client."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 (byte {error.start})") from error
    check_depth(body)
    value = _decode(text)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    if _SURROGATE.search(body):
        _check_surrogates(value)
    return value


def check_depth(body: bytes) -> None:
    """Refuse more than MAX_DEPTH nested arrays and objects, without recursion.

    Every round removes the innermost pairs, so what is left after MAX_DEPTH rounds is deeper than allowed (or not
    balanced, which is refused as well).
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRING.sub(b"", body).translate(_ONE_BRACKET, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels, or its brackets do not match")


def _decode(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error.msg} (character {error.pos})") from error
    except ValueError as error:  # an integer with more digits than Python converts
        raise RequestError("the body holds a number with too many digits") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise RequestError(f"the body holds the key {_first_duplicate(pairs)} more than once")
    return members


def _first_duplicate(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return show(name)
        seen.add(name)
    return "?"


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise RequestError("the body holds a number that is too large")
    return value


def _refuse_constant(name: str) -> float:
    raise RequestError(f"the body is not valid JSON: {name} is not a number")


def _check_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError("the body holds half of a surrogate pair (\\ud800 to \\udfff)") from error


def show(value: object, limit: int = 64) -> str:
    """A client's value as printable ASCII, quoted and cut, fit for an error message."""
    text = ascii(value) if not isinstance(value, str) else ascii(value[:limit])
    return text if len(text) <= limit else f"{text[:limit]}..."


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_unique)
