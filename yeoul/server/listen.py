"""Binding the port and reading certificates. Owns the listening socket's options; imports nothing heavy, so that a
port in use or a bad certificate is noticed before a model is loaded. Must not know HTTP or the engine."""

from __future__ import annotations

import errno
import socket
import ssl

from yeoul.errors import ConfigError
from yeoul.server.options import ServerOptions

BACKLOG = 2048
SEND_BUFFER = 32 << 10
"""Kernel send buffer of every connection (Linux doubles it): small, so that a reader that stopped reading shows."""


def bind(options: ServerOptions) -> socket.socket:
    """Bind and listen on `options.host:port`. Raises ConfigError, one line with a hint, when that is not possible, or
    when the certificates cannot be used.

    Connections that arrive before `run` serves them wait in the kernel's backlog.
    """
    _check_certificates(options)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        listener.bind((options.host, options.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(options, error) from error
    listener.setblocking(False)
    return listener


def address(listener: socket.socket, *, tls: bool = False) -> str:
    """The URL that reaches a bound socket, e.g. `http://127.0.0.1:8000`."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _check_certificates(options: ServerOptions) -> None:
    """Read them once, only to find out whether that works: an encrypted key would ask for a passphrase later."""
    if options.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"the certificate {options.ssl_certfile} or its key cannot be used: {error.strerror or error}",
            hint="--ssl-certfile takes a chain in PEM, --ssl-keyfile its key, which must not be encrypted",
            param="ssl_certfile",
        ) from error


def _bind_error(options: ServerOptions, error: OSError) -> ConfigError:
    where = f"{options.host}:{options.port}"
    if isinstance(error, socket.gaierror):
        return ConfigError(f"cannot listen on {where}: the host name is unknown", hint="check --host", param="host")
    if error.errno == errno.EADDRINUSE:
        hint = "another server runs there; stop it, or choose another --port (0: any free one)"
        return ConfigError(f"port {options.port} on {options.host} is in use", hint=hint, param="port")
    if error.errno == errno.EACCES:
        hint = "ports below 1024 need privileges; choose another --port"
        return ConfigError(f"no permission to listen on {where}", hint=hint, param="port")
    return ConfigError(f"cannot listen on {where}: {error.strerror}", hint="check --host and --port", param="host")
