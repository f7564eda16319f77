"""The checked JSON parser: what it refuses, and that refusing is cheap."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yeoul.errors import RequestError
from yeoul.server.wire.parse import MAX_DEPTH, check_depth, parse_object, show


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"a": 1} x', "JSON"),
        (b"[1]", "object"),
        (b"null", "object"),
        (b'"x"', "object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": 1, "a": 2}', "'a' more than once"),
        (b'{"b": {"x": 1, "y": 2, "x": 3}}', "'x' more than once"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "JSON"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": "\n"}', "JSON"),
        (b"{'a': 1}", "JSON"),
        (b'{"a": 01}', "JSON"),
        (b'{"a": 1,}', "JSON"),
        (b"[" * 100_000, "deeper"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "deeper"),
    ],
)
def test_refused(body, words):
    with pytest.raises(RequestError, match=words) as caught:
        parse_object(body)
    assert caught.value.status == 400 and len(str(caught.value)) < 200


def test_accepted():
    assert parse_object(b' {"a": [1, 2.5, null, true, "\\u00e9\\ud83d\\ude00"]} ') == {"a": [1, 2.5, None, True, "é😀"]}
    assert parse_object(b'{"a": "\\\\ud800"}') == {"a": "\\ud800"}
    deepest = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse_object(deepest)


def test_brackets_in_strings_do_not_count():
    text = '"[{' * 50 + "\\"
    assert parse_object(json.dumps({"a": text, "b": [text] * 3}).encode()) == {"a": text, "b": [text] * 3}


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "' + b'\\"' * 1_000_000,
        b'"' * 2_000_000,
        b"[]" * 1_000_000,
        b'{"a": [' + b'"' + b"[" * 2_000_000,
        b"[" * 2_000_000,
        b"[" * 33 + b'"\\' * 600_000,
    ],
    ids=["escaped quotes", "quotes", "pairs", "open string", "open brackets", "escapes"],
)
def test_the_depth_check_is_linear(body):
    started = time.perf_counter()
    with pytest.raises(RequestError):
        parse_object(body)
    assert time.perf_counter() - started < 5, "quadratic work would take hours"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=60,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.text(), json_values, max_size=4), st.booleans())
def test_agrees_with_the_standard_library_on_what_it_accepts(value, ascii_only):
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        parsed = parse_object(body)
    except RequestError as error:
        assert "surrogate" in str(error) or "UTF-8" in str(error)
    else:
        assert parsed == value


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 70), st.booleans())
def test_depth_is_counted_exactly(depth, as_object):
    opening, closing = (b'{"]}":', b"}") if as_object else (b"[", b"]")
    body = b'{"pad": [[], [], {}, "' + b"{" * 40 + b'"], "a": ' + opening * depth + b"1" + closing * depth + b"}"
    if depth + 1 > MAX_DEPTH:
        with pytest.raises(RequestError, match="deeper"):
            check_depth(body)
    else:
        check_depth(body)


def test_shown_values_are_short_printable_ascii():
    for value in ("é\n" * 100, 10**400, ["x" * 100], {"\x1b[31m": 1}):
        shown = show(value)
        assert shown.isascii() and shown.isprintable() and len(shown) <= 67
