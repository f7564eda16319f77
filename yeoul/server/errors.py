"""Errors that only HTTP has, and the JSON that every error becomes. Owns the error body; must not know routes.

A body never holds a path, an address or a traceback: errors raised on purpose carry text written for the client, all
others become one fixed sentence with the request id.
"""

from __future__ import annotations

from typing import Any

import orjson

from yeoul.errors import EngineError, RequestError, YeoulError

CLIENT_TYPE = "invalid_request_error"
SERVER_TYPE = "server_error"


class BodyTooLargeError(RequestError):
    """The body is over the limit; answered without reading the rest."""

    status = 413
    code = "body_too_large"


class BodyTypeError(RequestError):
    """The body is not declared as JSON. Web pages cannot send that type elsewhere without asking, so this also keeps
    a page in the user's browser from using a server on the same machine."""

    status = 415
    code = "unsupported_media_type"


class GenerationError(EngineError):
    """A sequence ended with an error. The message is the engine's line for the client and is sent as it is."""


class ClientDisconnectedError(Exception):
    """The client is gone: nobody is left to answer."""


def error_object(
    message: str, *, kind: str = CLIENT_TYPE, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error shape: {"error": {"message", "type", "param", "code"}}."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: YeoulError, request_id: str) -> dict[str, Any]:
    """The error object of an error raised on purpose. A 500 says nothing but the request id,
    unless its text was written for the client."""
    if error.status == 500 and not isinstance(error, GenerationError):
        return internal_error(request_id, error.code)
    message = error.message if error.hint is None else f"{error.message} (hint: {error.hint})"
    return error_object(message, kind=error.type, param=error.param, code=error.code)


def internal_error(request_id: str, code: str | None = "internal_error") -> dict[str, Any]:
    """The error object of everything unexpected; the log has the rest under the same request id."""
    message = f"The server failed to process the request (request id {request_id})."
    return error_object(message, kind=SERVER_TYPE, code=code)


def retry_after(error: YeoulError) -> str | None:
    """The value of the Retry-After header, for errors that have one."""
    seconds = getattr(error, "retry_after", None)
    return None if seconds is None else str(seconds)


def dump(body: dict[str, Any]) -> bytes:
    """JSON bytes of a response body."""
    return orjson.dumps(body)
