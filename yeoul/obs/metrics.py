"""The metrics registry: vLLM's Prometheus names and meanings under our prefix. Owns names, buckets and what feeds them;
must not know HTTP or the scheduler.

Gauges and counters are read from EngineStats when /metrics is scraped; histograms are fed as a RequestObserver. The
only labels are the served model's name and the finish reason: no client can add a series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from yeoul.engine.client import EngineStats, RequestTimes
from yeoul.engine.step_sizes import BOUNDS
from yeoul.types import FinishReason

CONTENT_TYPE = CONTENT_TYPE_LATEST

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(7) for step in (1, 2, 5))
"""1, 2, 5, 10 ... 5,000,000; every model gets those up to its context."""


class Histogram:
    """Counts of observations by bucket, and their sum. `bounds`: ascending upper bounds, inclusive."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float | None) -> None:
        """Count a value; None, an event that never came, is not counted."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's form: (upper bound, observations at or below it), +Inf last."""
        result: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            result.append((bound, float(running)))
        return result


class Metrics:
    """The registry of one server, and the RequestObserver that feeds its histograms. Used from one thread."""

    def __init__(self, model_name: str, *, prefix: str = "yeoul", max_model_len: int = 131072) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._stats: Callable[[], EngineStats] | None = None
        tokens = [bound for bound in TOKEN_BUCKETS if bound <= max_model_len]
        self._ttft = Histogram(TTFT_BUCKETS)
        self._itl = Histogram(ITL_BUCKETS)
        self._tpot = Histogram(ITL_BUCKETS)
        self._e2e = Histogram(REQUEST_BUCKETS)
        self._queue = Histogram(REQUEST_BUCKETS)
        self._inference = Histogram(REQUEST_BUCKETS)
        self._prefill = Histogram(REQUEST_BUCKETS)
        self._decode = Histogram(REQUEST_BUCKETS)
        self._prompt_tokens = Histogram(tokens)
        self._generation_tokens = Histogram(tokens)
        self._max_tokens = Histogram(tokens)
        self._n = Histogram(N_BUCKETS)
        self._longest = Histogram(tokens)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Where gauges and counters are read from at scrape time."""
        self._stats = stats

    def delivered(self, gap: float | None, num_tokens: int) -> None:
        """RequestObserver: a sequence delivered tokens, `gap` seconds after its previous delivery."""
        if num_tokens:
            self._itl.observe(gap)

    def finished(self, times: RequestTimes) -> None:
        """RequestObserver: a request ended."""
        self._ttft.observe(times.ttft)
        self._e2e.observe(times.e2e)
        self._queue.observe(times.queue)
        self._prefill.observe(times.prefill)
        self._decode.observe(times.decode)
        if times.prefill is not None:
            self._inference.observe(times.prefill + (times.decode or 0.0))
        if times.decode is not None and times.n == 1 and times.num_output_tokens > 1:
            self._tpot.observe(times.decode / (times.num_output_tokens - 1))
        self._prompt_tokens.observe(times.num_prompt_tokens)
        self._generation_tokens.observe(times.num_output_tokens)
        self._max_tokens.observe(times.max_tokens)
        self._n.observe(times.n)
        self._longest.observe(times.max_output_tokens)

    def render(self) -> bytes:
        """The text that /metrics answers."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """prometheus-client's collector interface."""
        if self._stats is not None:
            stats = self._stats()
            yield from self._gauges(stats)
            yield from self._counters(stats)
            yield self._step_sizes(stats)
        for name, text, histogram in self._histograms():
            family = HistogramMetricFamily(self._name(name), text, labels=("model_name",))
            family.add_metric((self._model_name,), histogram.cumulative(), histogram.total)
            yield family

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        usage = stats.kv_used_blocks / stats.kv_total_blocks if stats.kv_total_blocks else 0.0
        for name, text, value in (
            ("num_requests_running", "Sequences that steps compute.", float(stats.num_running)),
            ("num_requests_waiting", "Sequences that wait for their first step.", float(stats.num_waiting)),
            ("kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1.", usage),
            ("kv_computed_slots", "Token slots of used KV blocks that hold a token.", float(stats.kv_computed_slots)),
            ("kv_partial_slots", "Token slots wasted in last blocks.", float(stats.kv_partial_slots)),
            ("kv_reserved_slots", "Token slots reserved for later.", float(stats.kv_reserved_slots)),
            ("kv_over_reserved_slots", "Token slots reserved for nothing.", float(stats.kv_over_reserved_slots)),
        ):
            family = GaugeMetricFamily(self._name(name), text, labels=("model_name",))
            family.add_metric((self._model_name,), value)
            yield family

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("num_preemptions", "Preempted sequences.", stats.preemptions),
            ("preemption_lost_tokens", "Computed tokens that preemptions gave up.", stats.lost_tokens),
            ("preemption_swapped_tokens", "Computed tokens that preemptions swapped out.", stats.swapped_tokens),
            ("prompt_tokens", "Prompt tokens, cached ones too; recomputation is not counted.", stats.prompt_tokens),
            ("generation_tokens", "Generated tokens.", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
        ):
            family = CounterMetricFamily(self._name(name), text, labels=("model_name",))
            family.add_metric((self._model_name,), float(value))
            yield family
        labels = ("model_name", "finished_reason")
        family = CounterMetricFamily(self._name("request_success"), "Finished sequences.", labels=labels)
        for reason in FinishReason:
            family.add_metric((self._model_name, reason.value), float(stats.finished.get(reason.value, 0)))
        yield family

    def _step_sizes(self, stats: EngineStats) -> Metric:
        histogram = Histogram(map(float, BOUNDS))
        histogram.counts = list(stats.step_sizes) or histogram.counts
        histogram.total = float(stats.step_tokens)
        text = "Tokens that a step computes, of prompts and of replies."
        family = HistogramMetricFamily(self._name("iteration_tokens_total"), text, labels=("model_name",))
        family.add_metric((self._model_name,), histogram.cumulative(), histogram.total)
        return family

    def _histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        yield "time_to_first_token_seconds", "From arrival to the first token.", self._ttft
        yield "inter_token_latency_seconds", "Gap between two deliveries of tokens to one client.", self._itl
        yield "time_per_output_token_seconds", "The older name of inter_token_latency_seconds.", self._itl
        yield "request_time_per_output_token_seconds", "Mean time per token after the first.", self._tpot
        yield "e2e_request_latency_seconds", "From arrival to the end.", self._e2e
        yield "request_queue_time_seconds", "From arrival to the first step.", self._queue
        yield "request_inference_time_seconds", "From the first step to the last token.", self._inference
        yield "request_prefill_time_seconds", "From the first step to the first token.", self._prefill
        yield "request_decode_time_seconds", "From the first token to the last.", self._decode
        yield "request_prompt_tokens", "Prompt tokens of a request.", self._prompt_tokens
        yield "request_generation_tokens", "Generated tokens of a request.", self._generation_tokens
        yield "request_params_max_tokens", "max_tokens of a request.", self._max_tokens
        yield "request_max_num_generation_tokens", "Generated tokens of a request's longest sequence.", self._longest
        yield "request_params_n", "n of a request.", self._n

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"
