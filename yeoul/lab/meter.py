"""What times mean: TTFT, TPOT, TBT, ITL, E2E, throughput and goodput from what a client saw.

Pure: must not know sockets, engines or clocks. Token counts are the server's (usage); text is never tokenized again.
Failed requests are counted apart and are in no latency figure.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from yeoul.errors import ConfigError

NO_TOKENS = "no token came"


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Repeats of one measurement."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of at least one value."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    high: float


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Linear between the two nearest values; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p95, p99 = (_percentile(ordered, q) for q in (0.5, 0.9, 0.95, 0.99))
    mean = statistics.fmean(ordered)
    return Percentiles(count=len(ordered), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, high=ordered[-1])


def _percentile(ordered: Sequence[float], q: float) -> float:
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it. Times in seconds on one clock."""

    due: float
    """When it should have been sent. Latencies count from here, so a client that is late hides nothing."""
    sent: float
    ended: float
    deliveries: tuple[float, ...] = ()
    """When pieces with text arrived."""
    counts: tuple[int, ...] = ()
    """Tokens so far at each delivery, where the server says so; else empty."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """Of the server's usage; None if it sent none."""
    error: str | None = None

    @property
    def failure(self) -> str | None:
        """Why this request counts as failed."""
        return self.error or (None if self.deliveries else NO_TOKENS)

    @property
    def ttft(self) -> float:
        """Until the first delivery. Only for a request that did not fail."""
        return self.deliveries[0] - self.due

    @property
    def e2e(self) -> float:
        """Until the reply's end."""
        return self.ended - self.due

    @property
    def tpot(self) -> float | None:
        """Mean time of the tokens after the first; None for fewer than two, or if all came in one piece."""
        if self.completion_tokens is None or self.completion_tokens < 2 or len(self.deliveries) < 2:
            return None
        return (self.deliveries[-1] - self.deliveries[0]) / (self.completion_tokens - 1)

    def gaps(self) -> Iterator[float]:
        """TBT: between consecutive deliveries, however many tokens they carry."""
        return (later - earlier for earlier, later in pairwise(self.deliveries))

    def token_gaps(self) -> list[float]:
        """ITL: the gap before a delivery divided by its tokens, once for each token; empty if they are not known.

        Without running counts, the tokens after the first are taken as spread evenly over the later deliveries.
        """
        if self.counts:
            return _counted_gaps(self.deliveries, self.counts)
        if self.completion_tokens is None or self.completion_tokens < 2:
            return []
        share = (self.completion_tokens - 1) / max(len(self.deliveries) - 1, 1)
        return [gap / share for gap in self.gaps()]


def _counted_gaps(deliveries: Sequence[float], counts: Sequence[int]) -> list[float]:
    """A piece that brings no token has no gap of its own; its time belongs to the next token."""
    gaps: list[float] = []
    at, known = deliveries[0], counts[0]
    for later, count in zip(deliveries[1:], counts[1:], strict=True):
        if count > known:
            gaps += [(later - at) / (count - known)] * (count - known)
            at, known = later, count
    return gaps


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds in seconds; None: no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met_by(self, record: Record) -> bool:
        """Did it succeed within every bound? A reply without a TPOT cannot break a bound on it."""
        if record.failure is not None:
            return False
        pairs = ((self.ttft, record.ttft), (self.tpot, record.tpot), (self.e2e, record.e2e))
        return all(bound is None or value is None or value <= bound for bound, value in pairs)


def parse_slo(text: str) -> Slo:
    """`ttft=0.5,tpot=50ms`, in seconds where no unit is given. Raises ConfigError."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(ttft|tpot|e2e)=(\d+(?:\.\d+)?)(ms|s)?\s*", part, re.ASCII)
        if match is None or match[1] in bounds:
            raise ConfigError(f"{text!r} is no list of bounds such as ttft=0.5,tpot=50ms", hint="ttft, tpot, e2e")
        bounds[match[1]] = float(match[2]) / (1000 if match[3] == "ms" else 1)
    return Slo(**bounds)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. Rates are per second of `duration`."""

    requests: int
    completed: int
    failed: int
    errors: dict[str, int]
    """How often each failure happened."""
    without_usage: int
    """Completed requests for which the server gave no token counts: they are in no figure that needs them."""
    duration: float
    """Seconds from the first arrival to the last end."""
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    goodput: float | None
    """Requests per second that met the bounds; None if none were stated."""
    ttft: Percentiles | None
    tpot: Percentiles | None
    tbt: Percentiles | None
    itl: Percentiles | None
    e2e: Percentiles | None
    lateness: Percentiles | None
    """How long after its arrival each request was sent: large values mean that the client was the limit."""


def summarize(records: Sequence[Record], slo: Slo | None = None) -> Summary:
    """Sum up at least one record."""
    good = [record for record in records if record.failure is None]
    duration = max(record.ended for record in records) - min(record.due for record in records)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in good)
    output_tokens = sum(record.completion_tokens or 0 for record in good)
    rate = 1 / duration if duration > 0 else 0.0
    return Summary(
        requests=len(records),
        completed=len(good),
        failed=len(records) - len(good),
        errors=dict(Counter(record.failure for record in records if record.failure is not None)),
        without_usage=sum(record.completion_tokens is None for record in good),
        duration=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_second=len(good) * rate,
        prompt_tokens_per_second=prompt_tokens * rate,
        output_tokens_per_second=output_tokens * rate,
        goodput=None if slo is None else sum(map(slo.met_by, records)) * rate,
        ttft=percentiles(record.ttft for record in good),
        tpot=percentiles(tpot for record in good if (tpot := record.tpot) is not None),
        tbt=percentiles(gap for record in good for gap in record.gaps()),
        itl=percentiles(gap for record in good for gap in record.token_gaps()),
        e2e=percentiles(record.e2e for record in good),
        lateness=percentiles(record.sent - record.due for record in records),
    )
