"""A span of every request: what it says, whose child it is, how it ends; and what the flag says without the extra."""

import asyncio
import importlib.util
import subprocess
import sys
import time

import httpx
import pytest
from server_kit import Kit, Step, engine_server

from yeoul.errors import ConfigError
from yeoul.obs.spans import Spans, open_spans
from yeoul.server.options import ServerOptions
from yeoul.types import FinishReason

needs_sdk = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec("opentelemetry.sdk") is None,
    reason="the OpenTelemetry SDK is not installed",
)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "the prompt stays here"
CALLS = [
    ("text_completion", "/v1/completions", {"prompt": SECRET}),
    ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
    ("chat", "/v1/responses", {"input": SECRET}),
]


@pytest.fixture
def exported():
    """(Spans, a function that returns what was exported)."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(provider)
    yield spans, exporter.get_finished_spans
    spans.close()


@needs_sdk
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("operation", "path", "body"), CALLS)
def test_one_span_for_a_request_says_what_was_asked_and_what_happened(exported, operation, path, body, stream):
    spans, finished = exported
    kit, before = Kit(spans=spans), time.time_ns()
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = {**body, limit: 5, "temperature": 0.5, "stream": stream}
    assert kit.request("POST", path, json=body, headers={"x-request-id": "r-1"}).status_code == 200
    (span,) = finished()
    assert (span.name, span.kind.name, span.parent, span.status.status_code.name) == (
        f"{operation} toy", "SERVER", None, "UNSET",
    )  # fmt: skip
    assert before <= span.start_time <= span.end_time <= time.time_ns()
    expected = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "yeoul",
        "gen_ai.request.model": "toy",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(kit.client.requests[0].prompt_token_ids),
        "gen_ai.usage.output_tokens": 5,
        "yeoul.request_id": "r-1",
    }
    assert {name: span.attributes[name] for name in expected} == expected
    assert SECRET not in str(dict(span.attributes)) and "error.type" not in span.attributes


@needs_sdk
def test_several_choices(exported):
    spans, finished = exported
    Kit(spans=spans).complete(prompt=["a", "b"], n=2, max_tokens=2)
    (span,) = finished()
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length", "length", "length", "length")


@needs_sdk
@pytest.mark.parametrize(
    ("header", "is_child"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}", False),
        ("00-0-0-01", False),
        (f"ff-{TRACE}-{PARENT}-01", False),
        ("\xff" * 9000, False),
    ],
)
def test_the_parent_is_the_clients_span(exported, header, is_child):
    spans, finished = exported
    body, headers = {"prompt": "a"}, {"traceparent": header.encode("latin-1"), "tracestate": "other=1"}
    assert Kit(spans=spans).request("POST", "/v1/completions", json=body, headers=headers).status_code == 200
    (span,) = finished()
    assert (span.parent is not None) == is_child
    if is_child:
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)


@needs_sdk
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_the_spans_error(exported, stream):
    spans, finished = exported
    kit = Kit(lambda request, index: [Step("a"), Step(end=FinishReason.ERROR, error="no")], spans=spans)
    kit.complete(prompt="x", stream=stream)
    (span,) = finished()
    assert (span.status.status_code.name, span.attributes["error.type"]) == ("ERROR", "error")


@needs_sdk
def test_a_client_that_leaves_ends_its_span(exported):
    spans, finished = exported
    kit = Kit(spans=spans)
    kit.client.hold_at = 1

    async def leave():
        transport = httpx.ASGITransport(kit.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            call = asyncio.create_task(http.post("/v1/completions", json={"prompt": "abc", "stream": True}))
            while not kit.client.active:
                await asyncio.sleep(0.005)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    asyncio.run(leave())
    (span,) = finished()
    assert span.attributes["error.type"] == "abort"


@needs_sdk
def test_what_is_refused_has_no_span(exported):
    spans, finished = exported
    assert Kit(spans=spans).complete(prompt="a", top_p=7).status_code == 400
    assert Kit(spans=spans, max_model_len=4).complete(prompt="too long").status_code == 400
    assert finished() == ()


@needs_sdk
def test_a_real_engine_says_where_the_time_went(exported, tiny_llama):
    spans, finished = exported
    with engine_server(str(tiny_llama), spans=spans, max_num_seqs=2, max_model_len=256) as url:
        httpx.post(f"{url}/v1/completions", json={"prompt": "the quick", "max_tokens": 4, "ignore_eos": True})
        httpx.post(f"{url}/v1/embeddings", json={"input": "the quick"})
    reply, embedding = finished()
    latency = {name: reply.attributes[f"gen_ai.latency.{name}"] for name in (
        "time_in_queue", "time_in_model_prefill", "time_in_model_decode", "e2e",
    )}  # fmt: skip
    assert latency["time_in_model_prefill"] > 0 and latency["time_in_model_decode"] > 0
    lost = reply.attributes["yeoul.time_stalled"] + reply.attributes["yeoul.time_preempted"]
    assert sum(latency.values()) + lost == pytest.approx(2 * latency["e2e"])
    assert (
        embedding.attributes["gen_ai.operation.name"] == "embeddings"
        and embedding.attributes["gen_ai.usage.input_tokens"] > 0
    )
    assert embedding.status.status_code.name == "UNSET"


def test_without_the_extra_the_flag_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint needs OpenTelemetry") as caught:
        open_spans("http://localhost:4318/v1/traces")
    assert "pip install opentelemetry-sdk" in caught.value.hint


def test_the_sdk_is_not_imported_without_the_flag():
    """The API may be: FastAPI brings it."""
    code = "import sys, yeoul.server.run; sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "http://", "http://a b/", "http://a/\n"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint .* is not an http"):
        ServerOptions(otlp_traces_endpoint=url)
