"""yeoul serve: the HTTP server over one model. Owns the order of starting and what is printed on the way."""

from __future__ import annotations

import json
import socket
import sys
from functools import partial
from typing import Annotated, Any

import typer

from yeoul.cli.options import ENGINE, SERVER, LogLevel, ModelArgument, build, takes
from yeoul.config import EngineConfig
from yeoul.server.options import ServerOptions


@takes(SERVER, ENGINE)
def serve(
    model: ModelArgument,
    *,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name that requests use for the model; may be given more than once.", show_default="MODEL"),
    ] = None,
    log_level: LogLevel = "info",
    engine: dict[str, Any],
    server: dict[str, Any],
) -> None:
    """Serve a model over HTTP, with the API of OpenAI: /v1/chat/completions, /v1/completions, /v1/models.

    The first Ctrl-C or SIGTERM lets running requests finish; the second ends at once.
    """
    from yeoul.obs.logs import setup_logging
    from yeoul.server.listen import bind

    names = tuple(served_model_name or ())
    options = build(ServerOptions, served_model_names=names, **server)
    config = build(EngineConfig, model=model, served_model_name=names[0] if names else None, **engine)
    setup_logging(log_level)
    # First of all, so that a port in use is noticed before a model is loaded.
    with bind(options) as listener:
        code = _serve(config, options, listener)
    raise typer.Exit(code)


def _serve(config: EngineConfig, options: ServerOptions, listener: socket.socket) -> int:
    from yeoul.engine.build import build_engine
    from yeoul.engine.inproc import InprocClient
    from yeoul.obs.metrics import Metrics
    from yeoul.server.run import run
    from yeoul.server.text_service import TextService
    from yeoul.text.template import load_template

    engine = build_engine(config)
    info = engine.info
    template = load_template(engine.metadata)
    text = TextService(engine.tokenizer, template, max_model_len=info.max_model_len, grammars=engine.grammars)
    metrics = Metrics(info.model_name, prefix=options.metrics_prefix, max_model_len=info.max_model_len)
    client = InprocClient(engine, metrics)
    greet = partial(_greet, model=info.model_name, chats=template is not None)
    return run(listener, client, text, options, metrics, on_ready=greet)


def _greet(url: str, *, model: str, chats: bool) -> None:
    """The address, and a line that can be pasted into a shell."""
    body: dict[str, Any] = {"model": model, "max_tokens": 64, "temperature": 0}
    if chats:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "What is a river?"}]
    else:
        path, body["prompt"] = "/v1/completions", "The capital of France is"
    quoted = json.dumps(body).replace("'", "'\\''")
    print(f"serving {model} on {url} (API description: {url}/docs)", file=sys.stderr)
    print(f"try: curl {url}{path} -H 'Content-Type: application/json' -d '{quoted}'", file=sys.stderr, flush=True)
