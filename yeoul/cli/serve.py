"""yeoul serve: the HTTP server over one model. Owns the order of starting and what is printed on the way."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from yeoul.cli.failures import UsageError
from yeoul.cli.options import ENGINE, SERVER, LogFormat, LogLevel, ModelArgument, build, takes
from yeoul.config import EngineConfig, api_keys
from yeoul.errors import ConfigError
from yeoul.server.options import ServerOptions

if TYPE_CHECKING:
    from yeoul.engine.inproc import InprocClient
    from yeoul.obs.metrics import Metrics
    from yeoul.server.replies.reader import ReplyFormats
    from yeoul.server.text_service import TextService


@takes(SERVER, ENGINE)
def serve(
    model: ModelArgument,
    *,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name that requests use for the model; may be given more than once.", show_default="MODEL"),
    ] = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    engine: dict[str, Any],
    server: dict[str, Any],
) -> None:
    """Serve a model over HTTP, with the API of OpenAI: /v1/chat/completions, /v1/completions, /v1/models.

    The first Ctrl-C or SIGTERM lets running requests finish; the second ends at once.
    """
    from yeoul.obs.logs import setup_logging
    from yeoul.server.listen import bind

    server["api_key"] = _digests([*server["api_key"], *api_keys()])
    names = tuple(served_model_name or ())
    options = build(ServerOptions, served_model_names=names, **server)
    config = build(EngineConfig, model=model, served_model_name=names[0] if names else None, **engine)
    setup_logging(log_level, form=log_format)
    # First of all, so that a port in use is noticed before a model is loaded.
    with bind(options) as listener:
        code = _serve(config, options, listener)
    raise typer.Exit(code)


@dataclass(frozen=True)
class ServerParts:
    """What a server runs over."""

    client: InprocClient
    text: TextService
    metrics: Metrics
    formats: ReplyFormats
    chats: bool
    """Whether the model has a chat template."""


def server_parts(config: EngineConfig, options: ServerOptions) -> ServerParts:
    """Load the model and start its engine. The caller closes `client` and `text`, or lets server.run do it."""
    from yeoul.engine.build import build_engine
    from yeoul.engine.inproc import InprocClient
    from yeoul.obs.metrics import Metrics
    from yeoul.server.replies.reader import formats_of
    from yeoul.server.text_service import TextService
    from yeoul.text.chat import ChatEncoder
    from yeoul.text.template import KEY as TEMPLATE_KEY
    from yeoul.text.template import load_template

    source = {} if options.chat_template is None else {TEMPLATE_KEY: _read_template(options.chat_template)}
    engine = build_engine(config)
    info = engine.info
    template = load_template({**engine.metadata, **source})
    chat = None if template is None else ChatEncoder(engine.tokenizer, template)
    metrics = Metrics(info.model_name, prefix=options.metrics_prefix, max_model_len=info.max_model_len)
    formats = formats_of(
        None if template is None else template.source,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
    )
    text = TextService(engine.tokenizer, chat, max_model_len=info.max_model_len, grammars=engine.grammars)
    return ServerParts(InprocClient(engine, metrics), text, metrics, formats, chats=chat is not None)


def _serve(config: EngineConfig, options: ServerOptions, listener: socket.socket) -> int:
    from yeoul.server.run import run

    parts = server_parts(config, options)
    greet = partial(_greet, model=parts.client.info.model_name, chats=parts.chats, locked=bool(options.api_key))
    return run(listener, parts.client, parts.text, options, parts.metrics, parts.formats, on_ready=greet)


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the chat template {path} cannot be read: {reason}", param="chat_template") from error


def _digests(keys: list[str]) -> list[bytes]:
    """What is kept of the keys. Raises UsageError, which does not repeat it, for one that no header can carry."""
    from yeoul.server.auth import digest

    if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in keys):
        raise UsageError("an --api-key must be printable ASCII without spaces around it, and not empty")
    return [digest(key) for key in keys]


def _greet(url: str, *, model: str, chats: bool, locked: bool) -> None:
    """The address, and a line that can be pasted into a shell."""
    body: dict[str, Any] = {"model": model, "max_tokens": 64, "temperature": 0}
    if chats:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "What is a river?"}]
    else:
        path, body["prompt"] = "/v1/completions", "The capital of France is"
    quoted = json.dumps(body).replace("'", "'\\''")
    print(f"serving {model} on {url} (API description: {url}/docs)", file=sys.stderr)
    key = " -H 'Authorization: Bearer KEY'" if locked else ""
    print(f"try: curl {url}{path} -H 'Content-Type: application/json'{key} -d '{quoted}'", file=sys.stderr, flush=True)
