"""ServerOptions: what the HTTP side can be told. Owns names, ranges, defaults; must not know the engine or FastAPI."""

from __future__ import annotations

import ipaddress
import re

import msgspec

from yeoul.errors import ConfigError
from yeoul.server.replies.reader import REASONING_PARSERS, TOOL_CALL_PARSERS

DIGEST_BYTES = 32
ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\-\[\]:]+")
METRICS_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,31}")


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server listens, what it calls the model, and what it refuses. Times in seconds, sizes in bytes.

    Raises ConfigError, naming the option, for a value out of range, and for an address that other machines can reach
    unless there are keys, or `insecure` is set.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    insecure: bool = False
    api_key: tuple[bytes, ...] = ()
    """SHA-256 digests of the keys that are accepted (server/auth.py); the keys themselves are not kept. Empty: no key
    is wanted."""
    cors_origin: tuple[str, ...] = ()
    """Origins (`https://host`, or `*`) whose web pages may use the server from a browser. Empty: none."""
    ssl_certfile: str | None = None
    """Serve HTTPS with this chain of certificates (PEM)."""
    ssl_keyfile: str | None = None
    """Its private key, unless the chain's file holds it."""
    served_model_names: tuple[str, ...] = ()
    """Names a request may use for the model; the first one labels metrics. Empty: the engine's own model name."""
    chat_template: str | None = None
    """File with the chat template (jinja2) to use instead of the model's own."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls; `auto`: by its chat template."""
    reasoning_parser: str = "auto"
    """`think`: reasoning stands in <think> tags; `auto`: where the chat template has them."""
    metrics_prefix: str = "yeoul"
    access_log: bool = False
    shutdown_timeout: float = 30.0
    """How long running requests may take after the first SIGTERM or SIGINT before they are aborted."""
    health_timeout: float = 10.0
    """/health turns 503 when the engine's loop has not gone round for this long."""
    max_body_bytes: int = 2 << 20
    max_header_bytes: int = 16 << 10
    """Request line and header fields together."""
    max_header_fields: int = 100
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    """A connection that takes no byte for this long while some are pending is closed."""
    keep_alive_timeout: float = 5.0
    max_prompts: int = 32
    """Prompts in one completions request."""
    max_sequences: int = 64
    """Prompts times n."""
    max_messages: int = 2048

    def __post_init__(self) -> None:
        _check_range("port", self.port, 0, 65535)
        for name in ("shutdown_timeout", "health_timeout", "header_timeout", "body_timeout", "write_timeout"):
            _check_range(name, getattr(self, name), 0.01, 86400)
        _check_range("keep_alive_timeout", self.keep_alive_timeout, 0, 86400)
        for name in ("max_body_bytes", "max_header_bytes", "max_header_fields"):
            _check_range(name, getattr(self, name), 1, 1 << 30)
        for name in ("max_prompts", "max_sequences", "max_messages"):
            _check_range(name, getattr(self, name), 1, 1 << 20)
        _check_choice("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        _check_choice("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        if not METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix {self.metrics_prefix!r} must be letters, digits and _", param="metrics_prefix"
            )
        if not all(self.served_model_names):
            raise ConfigError("a served model name must not be empty", param="served_model_names")
        self._check_access()

    def _check_access(self) -> None:
        if any(len(digest) != DIGEST_BYTES for digest in self.api_key):
            raise ConfigError("api_key must hold SHA-256 digests", param="api_key")
        for origin in self.cors_origin:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origin {origin!r} is not an origin",
                    hint="write it like https://example.org",
                    param="cors_origin",
                )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile", param="ssl_keyfile")
        if not self.insecure and not self.api_key and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} can be reached from other machines and the server has no keys",
                hint="keep the default 127.0.0.1, set an --api-key, or pass --insecure if the network is trusted",
                param="host",
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host` (a name other than localhost counts as reachable)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} must be between {low:g} and {high:g}, got {value!r}", param=name)


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}", param=name)
