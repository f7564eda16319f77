"""OpenTelemetry spans of requests, exported over OTLP/HTTP. Owns all contact with the OpenTelemetry SDK, which is an
optional extra (`[otel]`) and is imported only where spans were asked for; must not know HTTP, routes or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from yeoul.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Attributes = Mapping[str, str | int | float | Sequence[str]]

PARENT_HEADERS = ("traceparent", "tracestate")
"""Of W3C Trace Context."""
EXPORT_TIMEOUT = 5.0
"""Seconds until an export is given up; a collector that hangs delays the end of the process by no more."""


class Spans:
    """Makes spans through a provider, which it shuts down at the end."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("yeoul", version("yeoul"))
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Mapping[str, str], started_ns: int, attributes: Attributes) -> Span:
        """A span of a server that began `started_ns` nanoseconds after 1970, under the parent that `headers` name.

        A parent that is malformed counts as none. Whoever calls must end the span.
        """
        from opentelemetry.trace import SpanKind

        parent = {header: headers[header] for header in PARENT_HEADERS if header in headers}
        return Span(
            self._tracer.start_span(
                name,
                context=self._propagator.extract(parent),
                kind=SpanKind.SERVER,
                attributes=dict(attributes),
                start_time=started_ns,
            )
        )

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()


class Span:
    """One that runs."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        """Ends it now. `error`: what kind of failure it was."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def open_spans(endpoint: str) -> Spans:
    """Spans that a background thread sends to this URL (as it is, e.g. http://localhost:4318/v1/traces).

    Raises ConfigError where the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry, which is not installed",
            hint="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
            param="otlp_traces_endpoint",
        ) from error
    resource = Resource.create({"service.name": "yeoul", "service.version": version("yeoul")})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT)))
    return Spans(provider)
