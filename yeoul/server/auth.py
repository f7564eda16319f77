"""API keys. Owns which paths are open, and how a key is compared; must not know routes.

The decision is made on the raw path, before any route sees the request, and everything is closed that is not listed
here: a route that is added, or a path written in some other way, is closed by itself. Only digests of the keys are
kept, so that no log, error or memory dump of the options can show one.

Whose key it was goes with the request: what one client's prompts left in the prefix cache must not show, by its speed,
to another one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from yeoul.server.errors import dump, error_object

OPEN_PATHS = frozenset((b"/health", b"/ready"))
"""What load balancers ask, without a key."""
SCHEME = b"bearer "
OWNER = "yeoul.owner"
"""Where the scope of an allowed request has its key's name."""
MESSAGE = "this server wants an API key: send the header Authorization: Bearer KEY"


def digest(key: str) -> bytes:
    """SHA-256 of a key: what the server keeps and compares."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyGuard:
    """ASGI middleware: 401 for every request without one of the keys, but for OPEN_PATHS. `digests`: of the keys."""

    def __init__(self, app: ASGIApp, digests: Iterable[bytes]) -> None:
        self._app = app
        self._digests = tuple(digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or scope.get("raw_path") in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif owner := self._owner(scope):
            await self._app({**scope, OWNER: owner}, receive, send)
        else:
            await _refuse(send)

    def _owner(self, scope: Scope) -> str | None:
        """The name of the key in the one Authorization header; None without a known one.

        Takes the same time whichever key it is.
        """
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1 or values[0][: len(SCHEME)].lower() != SCHEME:
            return None
        sent = hashlib.sha256(values[0][len(SCHEME) :].strip()).digest()
        known = [digest.hex() for digest in self._digests if hmac.compare_digest(sent, digest)]
        return known[0] if known else None


def owner_of(scope: Scope) -> str:
    """Whose key a request brought; empty where the server has none."""
    return str(scope.get(OWNER, ""))


async def _refuse(send: Send) -> None:
    body = dump(error_object(MESSAGE, code="invalid_api_key"))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
