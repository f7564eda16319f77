"""What the figures mean, on records written by hand."""

import pytest

from yeoul.errors import ConfigError
from yeoul.lab.meter import Record, Slo, parse_slo, percentiles, spread, summarize


def record(*deliveries, tokens=None, due=0.0, **fields):
    times = {"due": due, "sent": due, "ended": deliveries[-1] if deliveries else due}
    return Record(**times | {"deliveries": deliveries, "completion_tokens": tokens, "prompt_tokens": 5} | fields)


def test_percentiles_lie_between_the_nearest_values():
    figures = percentiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (figures.p50, figures.mean, figures.high, figures.count) == (3.0, 3.0, 5.0, 5)
    assert figures.p90 == pytest.approx(4.6) and figures.p99 == pytest.approx(4.96)
    assert percentiles([7.0]).p99 == 7.0 and percentiles([]) is None


def test_spread_is_median_least_and_greatest():
    assert spread([3.0, 1.0, 10.0]) == spread([10.0, 3.0, 1.0]) and spread([3.0, 1.0, 10.0]).median == 3.0


def test_latencies_count_from_when_a_request_was_due():
    late = record(3.0, 4.0, tokens=2, due=1.0, sent=2.5)
    assert (late.ttft, late.e2e, late.tpot) == (2.0, 3.0, 1.0)
    assert summarize([late]).lateness.high == 1.5


def test_a_reply_in_one_piece_has_no_tpot():
    assert record(1.0, tokens=50).tpot is None and record(1.0, tokens=50).token_gaps() == []


def test_a_piece_without_a_new_token_has_no_gap_of_its_own():
    counted = record(0.1, 0.2, 0.5, tokens=3, counts=(1, 1, 3))
    assert counted.token_gaps() == pytest.approx([0.2, 0.2])


def test_unknown_counts_leave_only_what_needs_none():
    summary = summarize([record(0.1, 0.2, 0.4, prompt_tokens=None)])
    assert summary.without_usage == 1 and summary.itl is None and summary.tpot is None
    assert summary.tbt.count == 2 and summary.output_tokens_per_second == 0


def test_rates_are_over_the_whole_run_failures_included():
    records = [record(1.0, 2.0, tokens=20), record(due=1.0, error="no", ended=4.0)]
    summary = summarize(records, Slo(ttft=1.5))
    assert summary.duration == 4.0 and summary.output_tokens_per_second == 5.0
    assert summary.prompt_tokens_per_second == 1.25 and summary.requests_per_second == 0.25 == summary.goodput


def test_all_failed_is_a_summary_without_figures():
    summary = summarize([record(error="a"), record(error="b"), record(error="a")])
    assert summary.errors == {"a": 2, "b": 1} and summary.completed == 0
    assert summary.ttft is summary.tpot is summary.tbt is summary.itl is summary.e2e is None


@pytest.mark.parametrize(
    ("slo", "met"),
    [(Slo(), True), (Slo(ttft=0.5), True), (Slo(ttft=0.4), False), (Slo(tpot=0.1), True), (Slo(tpot=0.09), False),
     (Slo(ttft=0.5, tpot=0.1, e2e=0.7), True), (Slo(ttft=0.5, e2e=0.6), False)],
)  # fmt: skip
def test_bounds_must_all_be_met(slo, met):
    assert slo.met_by(record(0.5, 0.7, tokens=3)) is met


def test_a_reply_of_one_token_cannot_break_a_bound_on_tpot_and_a_failure_meets_none():
    assert Slo(tpot=1e-9).met_by(record(0.5, tokens=1))
    assert not Slo().met_by(record(error="x")) and not Slo().met_by(record())


def test_bounds_are_parsed():
    assert parse_slo("ttft=0.5,tpot=50ms") == Slo(ttft=0.5, tpot=0.05)
    assert parse_slo(" e2e=2s ") == Slo(e2e=2.0)
    for text in ("", "ttft", "ttft=", "ttft=-1", "ttft=1,ttft=2", "speed=1", "ttft=1m", "ttft=nan", "ttft=1,"):
        with pytest.raises(ConfigError):
            parse_slo(text)
