"""The answers as OpenAPI describes them. Owns documentation only: the shapes themselves are in server/wire, and a test
holds the two together by calling every route.
"""

from __future__ import annotations

from typing import Any

from yeoul.server.wire.call import TIME_PARTS

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}
OBJECT: Schema = {"type": "object"}


def _object(optional: dict[str, Schema] | None = None, /, **members: Schema) -> Schema:
    """An object with these members, all of them there, and perhaps the optional ones."""
    return {"type": "object", "properties": members | (optional or {}), "required": list(members)}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def _const(value: str) -> Schema:
    return {"const": value}


_TIMINGS = _object(
    **dict.fromkeys(TIME_PARTS, NUMBER), total=NUMBER, cached_tokens=INTEGER, tokens_per_second=_or_null(NUMBER)
)
_USAGE = _object(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=_object(cached_tokens=INTEGER),
)
_EXTRA = {"timings": {**_TIMINGS, "description": "Seconds; only with the header X-Yeoul-Timings: 1."}}


def _answer(kind: str, choice: Schema) -> Schema:
    head = {"id": STRING, "object": _const(kind), "created": INTEGER, "model": STRING}
    return _object(_EXTRA, **head, choices=_array(choice), usage=_USAGE)


_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
_CALL = _object(id=STRING, type=_const("function"), function=_object(name=STRING, arguments=STRING))
_MESSAGE = _object(
    {"reasoning_content": _or_null(STRING), "tool_calls": _array(_CALL)},
    role=_const("assistant"),
    content=_or_null(STRING),
    refusal=NULL,
)
COMPLETION = _answer(
    "text_completion", _object(index=INTEGER, text=STRING, logprobs=_or_null(OBJECT), finish_reason=_FINISH)
)
CHAT = _answer(
    "chat.completion", _object(index=INTEGER, message=_MESSAGE, logprobs=_or_null(OBJECT), finish_reason=_FINISH)
)
RESPONSE = _object(
    _EXTRA,
    id=STRING,
    object=_const("response"),
    created_at=INTEGER,
    status={"enum": ["completed", "incomplete"]},
    model=STRING,
    output=_array(_object(id=STRING, type={"enum": ["message", "reasoning"]}, content=_array(OBJECT))),
    usage=_object(input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER),
    metadata=OBJECT,
)
MODEL = _object(id=STRING, object=_const("model"), created=INTEGER, owned_by=STRING, max_model_len=INTEGER)
MODELS = _object(object=_const("list"), data=_array(MODEL))
TOKENIZE = _object(count=INTEGER, max_model_len=INTEGER, tokens=_array(INTEGER), token_strs=_or_null(_array(STRING)))
EMBEDDINGS = _object(
    object=_const("list"),
    data=_array(_object(object=_const("embedding"), index=INTEGER, embedding={"anyOf": [_array(NUMBER), STRING]})),
    model=STRING,
    usage=_object(prompt_tokens=INTEGER, total_tokens=INTEGER),
)
DETOKENIZE = _object(prompt=STRING)
TOKENIZER_INFO = _object(tokenizer_class=STRING, vocab_size=INTEGER, chat_template=_or_null(STRING))
STATUS = _object(status=STRING)
VERSION = _object(version=STRING)
_ERROR = _object(
    error=_object(message=STRING, type=STRING, param=_or_null(STRING), code=_or_null(STRING)),
)
_ERROR_TEXTS = {
    400: "The request is malformed, or asks for something that is not supported",
    401: "No API key, where the server wants one",
    404: "Another model than the one that is served, or a path that is not there",
    408: "The headers or the body took too long to arrive",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    429: "Too much work waits; see Retry-After",
    431: "The headers are too large",
    500: "The engine failed while it computed this request",
    503: "The server shuts down, or the engine is gone",
}
_GET_ERRORS = (400, 401, 404, 408, 431, 503)


def answers(schema: Schema | None, *, posts: bool = False, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: its answer (`None`: text) and its errors."""
    content: dict[str, Any] = {"text/plain": {"schema": STRING}}
    if schema is not None:
        content = {"application/json": {"schema": schema}}
    if streams:
        content["text/event-stream"] = {"schema": STRING}
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
        for status, text in _ERROR_TEXTS.items()
        if posts or status in _GET_ERRORS
    }
    return {200: {"description": "The answer", "content": content}, **errors}
