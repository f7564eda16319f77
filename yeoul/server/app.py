"""The routes. Owns paths, methods and how errors become responses; every route's work is in handlers.

FastAPI does the routing and describes the API; bodies are parsed by server/wire, so its own validation never runs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from yeoul.engine.client import EngineClient
from yeoul.errors import YeoulError
from yeoul.obs.metrics import Metrics
from yeoul.server import openapi_answers as shapes
from yeoul.server.auth import KeyGuard
from yeoul.server.edge import Edge, request_id_of
from yeoul.server.errors import describe, dump, error_object, retry_after
from yeoul.server.handlers import Handlers
from yeoul.server.openapi import (
    CHAT_EXTRA,
    COMPLETION_EXTRA,
    DESCRIPTION,
    DETOKENIZE_EXTRA,
    EMBEDDING_EXTRA,
    MODEL_EXTRA,
    RESPONSES_EXTRA,
    TOKENIZE_EXTRA,
)
from yeoul.server.options import ServerOptions
from yeoul.server.replies.reader import PLAIN, ReplyFormats
from yeoul.server.text_service import TextService
from yeoul.server.wire.parse import show

Endpoint = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("yeoul.server")


def create_app(
    client: EngineClient,
    text: TextService,
    options: ServerOptions,
    metrics: Metrics | None = None,
    formats: ReplyFormats = PLAIN,
) -> FastAPI:
    """The ASGI application over an engine client. `app.state.handlers.draining = True` refuses new work.

    `metrics` is the client's RequestObserver, so that histograms are fed; without it /metrics has gauges and counters
    only (histograms stay empty). `formats`: what the model writes beside content.
    """
    if metrics is None:
        metrics = Metrics(client.info.model_name, prefix=options.metrics_prefix)
    metrics.watch(client.stats)
    handlers = Handlers(client, text, options, metrics, formats)
    app = FastAPI(
        title="Yeoul",
        description=DESCRIPTION,
        version=handlers.software_version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.handlers = handlers
    _add_layers(app, options)
    app.add_exception_handler(YeoulError, _yeoul_error)
    app.add_exception_handler(HTTPException, _http_error)
    _add_routes(app, handlers)
    return app


def _add_layers(app: FastAPI, options: ServerOptions) -> None:
    """Each one goes around those before it: a browser's preflight has no key, and even a refusal has a request id."""
    if options.api_key:
        app.add_middleware(KeyGuard, digests=options.api_key)
    if options.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origin,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    app.add_middleware(Edge)


def _add_routes(app: FastAPI, handlers: Handlers) -> None:
    _get(app, "/v1/models", handlers.models, shapes.MODELS)
    _get(app, "/v1/models/{model:path}", handlers.model, shapes.MODEL, MODEL_EXTRA)
    _post(app, "/v1/completions", handlers.completions, COMPLETION_EXTRA, shapes.COMPLETION, streams=True)
    _post(app, "/v1/chat/completions", handlers.chat, CHAT_EXTRA, shapes.CHAT, streams=True)
    _post(app, "/v1/responses", handlers.responses, RESPONSES_EXTRA, shapes.RESPONSE, streams=True)
    _post(app, "/v1/embeddings", handlers.embeddings, EMBEDDING_EXTRA, shapes.EMBEDDINGS)
    _post(app, "/tokenize", handlers.tokenize, TOKENIZE_EXTRA, shapes.TOKENIZE)
    _post(app, "/detokenize", handlers.detokenize, DETOKENIZE_EXTRA, shapes.DETOKENIZE)
    _get(app, "/tokenizer_info", handlers.tokenizer_info, shapes.TOKENIZER_INFO)
    _get(app, "/health", handlers.health, shapes.STATUS)
    _get(app, "/ready", handlers.ready, shapes.STATUS)
    _get(app, "/version", handlers.version, shapes.VERSION)
    _get(app, "/metrics", handlers.metrics)
    app.add_api_route("/docs", handlers.docs, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)


def _get(
    app: FastAPI,
    path: str,
    endpoint: Endpoint,
    shape: shapes.Schema | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """`shape`: of the answer; None: text."""
    kind = Response if shape is None else JSONResponse
    app.add_api_route(
        path,
        endpoint,
        methods=["GET"],
        response_model=None,
        response_class=kind,
        responses=shapes.answers(shape),
        openapi_extra=extra,
    )
    app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)


def _post(
    app: FastAPI,
    path: str,
    endpoint: Endpoint,
    extra: dict[str, Any],
    shape: shapes.Schema,
    *,
    streams: bool = False,
) -> None:
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        response_model=None,
        openapi_extra=extra,
        responses=shapes.answers(shape, posts=True, streams=streams),
    )


async def _yeoul_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, YeoulError):
        raise error
    if error.status == 500:
        log.error("request %s failed", request_id_of(request.scope), exc_info=error)
    seconds = retry_after(error)
    headers = {} if seconds is None else {"retry-after": seconds}
    return _error_response(error.status, describe(error, request_id_of(request.scope)), headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """What routing itself refuses: an unknown path, a method that a path does not have."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        body = error_object(f"there is no {show(request.url.path)} here (hint: see /docs)", code="not_found")
    elif error.status_code == 405:
        body = error_object("this path does not have this method (hint: see /docs)", code="method_not_allowed")
    else:
        body = error_object("the request was refused", code=None)
    return _error_response(error.status_code, body, dict(error.headers or {}))


def _error_response(status: int, body: dict[str, Any], headers: dict[str, str]) -> Response:
    return Response(dump(body), status, headers, "application/json")
