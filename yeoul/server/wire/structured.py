"""`response_format` and `structured_outputs`: the form that a reply must have. Owns their shapes on the wire; whether a
schema or grammar makes sense is found out where it is compiled.
"""

from __future__ import annotations

import json

from yeoul.server.wire.fields import Fields, kind
from yeoul.server.wire.parse import show
from yeoul.types import Structured, StructuredKind

FORMATS = ("text", "json_object", "json_schema")
OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")


def read_structured(fields: Fields) -> Structured | None:
    """What the reply must be, or None. Raises RequestError for a malformed field, or for both of them."""
    by_format, by_output = _read_format(fields), _read_outputs(fields)
    if by_format is not None and by_output is not None:
        fields.refuse("structured_outputs", "cannot be combined with response_format")
    return by_output if by_format is None else by_format


def _read_format(fields: Fields) -> Structured | None:
    """OpenAI's: {"type": "json_schema", "json_schema": {"name", "schema", "strict", "description"}}."""
    given = fields.object("response_format")
    if given is None:
        return None
    name = given.string("type")
    if name not in FORMATS:
        given.refuse("type", f"must be one of {', '.join(FORMATS)}, got {'nothing' if name is None else show(name)}")
    structured = None
    if name == "json_object":
        structured = Structured(StructuredKind.JSON, '{"type":"object"}', "response_format")
    if name == "json_schema":
        structured = _read_schema(given)
    given.refuse_rest()
    return structured


def _read_schema(given: Fields) -> Structured:
    inner = given.object("json_schema")
    if inner is None:
        given.refuse("json_schema", "is required")
    schema = inner.take("schema")
    if not isinstance(schema, dict):
        inner.refuse("schema", f"must be an object, got {kind(schema)}")
    inner.string("name")
    inner.string("description")
    inner.boolean("strict")
    inner.refuse_rest()
    return Structured(StructuredKind.JSON, _dump(schema), "response_format")


def _read_outputs(fields: Fields) -> Structured | None:
    """vLLM's: an object with one of `json`, `regex`, `choice`, `grammar`, `json_object`."""
    given = fields.object("structured_outputs")
    if given is None:
        return None
    found = [(name, value) for name in OUTPUTS if (value := given.take(name)) is not None]
    given.refuse_rest()
    if len(found) != 1:
        fields.refuse("structured_outputs", f"must have exactly one of {', '.join(OUTPUTS)}; has {len(found)}")
    ((name, value),) = found
    return _output(given, name, value)


def _output(given: Fields, name: str, value: object) -> Structured:
    param = f"structured_outputs.{name}"
    if name == "json_object":
        if value is not True:
            given.refuse(name, f"must be true, got {show(value)}")
        return Structured(StructuredKind.JSON, '{"type":"object"}', param)
    if name == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
            given.refuse(name, "must be a list of strings that are not empty")
        return Structured(StructuredKind.CHOICE, _dump(value), param)
    if name == "json" and isinstance(value, dict):
        return Structured(StructuredKind.JSON, _dump(value), param)
    if not isinstance(value, str):
        given.refuse(name, f"must be a string, got {kind(value)}")
    return Structured(StructuredKind(name), value, param)


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
