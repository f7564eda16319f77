"""Reading a request's body. Owns the size limit and the content type; must not know JSON."""

from __future__ import annotations

from starlette.requests import Request

from yeoul.server.errors import BodyTooLargeError, BodyTypeError, ClientDisconnectedError
from yeoul.server.wire.parse import show


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most `limit` bytes. What is over the limit is neither waited for nor kept.

    Raises BodyTypeError (415), BodyTooLargeError (413), ClientDisconnectedError.
    """
    _check_type(request.headers.get("content-type"))
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


def _check_type(content_type: str | None) -> None:
    media_type = (content_type or "").split(";", 1)[0].strip().lower()
    if media_type != "application/json":
        got = "none" if content_type is None else show(content_type)
        raise BodyTypeError(f"the body's type must be JSON, got {got}", hint="send Content-Type: application/json")


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is larger than {limit} bytes", hint="send fewer or shorter prompts")
