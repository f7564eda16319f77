"""The outermost layer around the routes. Owns request ids and what happens to unexpected exceptions; must not know
what any route does.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from yeoul.server.errors import ClientDisconnectedError, dump, internal_error

REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
SCOPE_KEY = "yeoul.request_id"
RECEIVED_KEY = "yeoul.received_ns"

log = logging.getLogger("yeoul.server")


class Edge:
    """ASGI middleware: every response carries X-Request-Id, the client's own where it is well-formed.

    An exception that no route expected becomes a 500 with fixed text; its traceback is logged under the request id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[SCOPE_KEY] = _request_id(scope)
        scope[RECEIVED_KEY] = time.time_ns()
        started = False

        async def tagged_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, tagged_send)
        except ClientDisconnectedError:
            log.debug("request %s: the client is gone", request_id)
        except Exception as error:
            log.error("request %s failed", request_id, exc_info=error)
            if not started:
                await _send_500(tagged_send, request_id)


def request_id_of(scope: Scope) -> str:
    """The id that Edge gave a request."""
    return str(scope[SCOPE_KEY])


def received_ns_of(scope: Scope) -> int:
    """When a request's header was here, in nanoseconds since 1970."""
    return int(scope[RECEIVED_KEY])


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return str(value.decode("ascii"))
    return uuid.uuid4().hex


async def _send_500(send: Send, request_id: str) -> None:
    body = dump(internal_error(request_id))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})
