"""What a span says of a call, in the words of OpenTelemetry's semantic conventions for generative AI. Owns the names
of attributes; must not know the SDK. Nothing that a client or the model wrote is in them, but the model's name.

Times are those of the sequence that ended last (SequenceTimes), in seconds; the conventions have none, so they bear the
names that vLLM gives them, and `yeoul.` where it has none.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from yeoul.obs.spans import Attributes, Spans
from yeoul.server.edge import received_ns_of, request_id_of
from yeoul.server.generation import Generation
from yeoul.server.wire.call import Call, Usage
from yeoul.types import FinishReason


def follow(spans: Spans, request: Request, operation: str, call: Call, generation: Generation) -> None:
    """Give a call a span, from the moment its request came until its generation is closed.

    `operation`: chat, text_completion or embeddings.
    """
    attributes = {**asked(operation, call), "yeoul.request_id": request_id_of(request.scope)}
    name = f"{operation} {call.model}"
    span = spans.begin(name, request.headers, received_ns_of(request.scope), attributes)

    def end() -> None:
        span.end(happened(call, generation), failure_of(generation))

    generation.on_close = end


def asked(operation: str, call: Call) -> Attributes:
    """Of the request."""
    params = call.params
    given: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "yeoul",
        "gen_ai.request.model": call.model,
    }
    if operation != "embeddings":
        given |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k or None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.n if params.n != 1 else None,
        }
    return {name: value for name, value in given.items() if value is not None}


def happened(call: Call, generation: Generation) -> Attributes:
    """Of the answer, as far as it came."""
    usage = generation.usage
    reasons = [str(generation.ends[index]) for index in sorted(generation.ends)]
    return {
        "gen_ai.response.model": call.model,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        **_times(usage),
    }


def _times(usage: Usage) -> dict[str, float]:
    times = usage.times
    if times is None:
        return {}
    return {
        "gen_ai.latency.time_in_queue": times.queue,
        "gen_ai.latency.time_in_model_prefill": times.prefill,
        "gen_ai.latency.time_in_model_decode": times.decode,
        "gen_ai.latency.e2e": times.total,
        "yeoul.time_stalled": times.stalled,
        "yeoul.time_preempted": times.preempted,
    }


def failure_of(generation: Generation) -> str | None:
    """`error`: the engine failed; `abort`: the client went away, or the server ended; None: neither."""
    ends = generation.ends
    if FinishReason.ERROR in ends.values():
        return "error"
    if len(ends) < generation.num_choices or FinishReason.ABORT in ends.values():
        return "abort"
    return None
