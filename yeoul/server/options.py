"""ServerOptions: what the HTTP side can be told. Owns names, ranges, defaults; must not know the engine or FastAPI."""

from __future__ import annotations

import ipaddress
import re

import msgspec

from yeoul.errors import ConfigError

METRICS_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,31}")


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server listens, what it calls the model, and what it refuses. Times in seconds, sizes in bytes.

    Raises ConfigError, naming the option, for a value out of range, and for an address that other machines can reach
    unless `insecure` is set: there are no keys yet, so everybody who reaches the port may use the model.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    insecure: bool = False
    served_model_names: tuple[str, ...] = ()
    """Names a request may use for the model; the first one labels metrics. Empty: the engine's own model name."""
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
        if not METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                f"metrics_prefix {self.metrics_prefix!r} must be letters, digits and _", param="metrics_prefix"
            )
        if not all(self.served_model_names):
            raise ConfigError("a served model name must not be empty", param="served_model_names")
        if not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} can be reached from other machines and the server has no keys",
                hint="keep the default 127.0.0.1, or pass --insecure if the network itself is trusted",
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
