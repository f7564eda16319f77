"""yeoul bench serve: load for any OpenAI-compatible server. Owns the flags and the table; `lab` owns the measuring."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from yeoul import __version__
from yeoul.cli.failures import UsageError
from yeoul.cli.options import Flag, Group, JsonFlag, build, takes
from yeoul.cli.terminal import progress
from yeoul.errors import ConfigError, YeoulError
from yeoul.lab.workload import ARRIVALS, ENDPOINTS, Item, Workload

if TYPE_CHECKING:
    from yeoul.lab.client import Target
    from yeoul.lab.load import Cost
    from yeoul.lab.meter import Percentiles, Slo, Summary

LOAD = Group(
    "load",
    Workload,
    "Load",
    (
        Flag("requests", int, "Requests that are measured; one more goes first."),
        Flag("rate", float | None, "Open loop: requests a second, whatever the server does.", False),
        Flag("arrivals", str, "How requests of --rate arrive.", True, f"[{'|'.join(ARRIVALS)}]"),
        Flag("burst", int, "Requests that arrive together with --arrivals burst."),
        Flag("users", int | None, "Closed loop: users that each wait for their reply.", "1"),
        Flag("input_tokens", str, "Length of random prompts.", True, "N[-M]"),
        Flag("output_tokens", str, "Length of replies.", True, "N[-M]"),
        Flag("prompts", str | None, "Prompts, one a line or .jsonl, instead of random ones.", False, "FILE"),
        Flag("seed", int, "Same seed: same prompts, lengths and arrivals."),
    ),
)


def slo_bounds(text: str) -> Slo:
    """Parser of --slo."""
    from yeoul.lab.meter import parse_slo

    try:
        return parse_slo(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def check_endpoint(name: str) -> str:
    """Callback of --endpoint."""
    if name not in ENDPOINTS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(ENDPOINTS)}")
    return name


@takes(LOAD)
def serve(
    *,
    base_url: Annotated[str, typer.Option(metavar="URL", help="The API, e.g. http://127.0.0.1:8000/v1.")],
    model: Annotated[str, typer.Option(help="Name under which the server has the model.")],
    endpoint: Annotated[
        str, typer.Option(metavar=f"[{'|'.join(ENDPOINTS)}]", callback=check_endpoint, help="Which API is called.")
    ] = "completions",
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for replies of full length; off for servers that refuse unknown fields.")
    ] = True,
    slo: Annotated[
        Any, typer.Option(parser=slo_bounds, metavar="BOUNDS", help="Bounds of goodput, e.g. ttft=0.5,tpot=50ms.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File that holds the API key.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=86400, help="Seconds that one request may take.")] = 600.0,
    json: JsonFlag = False,
    load: dict[str, Any],
) -> None:
    """Load any OpenAI-compatible server and report its latencies, throughput and goodput.

    With --rate requests arrive whether or not the server keeps up (open loop); else --users wait for their replies.
    Latencies count from a request's arrival. Failed requests are counted apart.
    """
    from yeoul.lab.load import measure, run
    from yeoul.lab.meter import summarize

    workload = build(Workload, **load)
    key = None if api_key_file is None else _read_key(api_key_file)
    target = _target(base_url, model=model, endpoint=endpoint, ignore_eos=ignore_eos, timeout=timeout, api_key=key)
    first, *items = workload.items()
    run(_check(target, first))
    with progress("bench serve", "requests") as show:
        records, cost = run(measure(target, items, workload.arrival_times(), workload.users or 1, show))
    summary = summarize(records, slo)
    _print_table(summary, cost)
    if json:
        print(_as_json(target, workload, slo, summary, cost))


def _target(base_url: str, **fields: Any) -> Target:
    from yeoul.lab.client import Target, parse_base_url

    try:
        host, port, tls, path = parse_base_url(base_url)
    except ConfigError as error:
        raise UsageError(str(error), hint=error.hint) from None
    return Target(host=host, port=port, tls=tls, path=path, **fields)


def _read_key(path: Path) -> str:
    from yeoul.lab.client import check_api_key

    try:
        return check_api_key(path.read_text(encoding="utf-8"))
    except ConfigError as error:
        raise UsageError(f"{path}: {error}") from None


async def _check(target: Target, item: Item) -> None:
    """One request that is not measured: a server that cannot answer is one line, not a table of failures."""
    from yeoul.lab.client import exchange, tls_context

    record = await exchange(target, item, perf_counter(), tls_context(target))
    if record.failure is not None:
        hint = "try --no-ignore-eos" if "ignore_eos" in record.failure else None
        raise YeoulError(f"{target.host}:{target.port} does not serve this: {record.failure}", hint=hint)


def _as_json(target: Target, workload: Workload, slo: Slo | None, summary: Summary, cost: Cost) -> str:
    told = msgspec.to_builtins(target) | {"api_key": target.api_key and "given"}
    parts = {
        "benchmark": "serve",
        "version": __version__,
        "target": told,
        "workload": workload,
        "slo": slo,
        "summary": summary,
        "client": cost,
    }
    return msgspec.json.encode(parts).decode()


def _print_table(summary: Summary, cost: Cost) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 120)
    table = Table("ms", "p50", "p90", "p95", "p99", "max", "mean", "values")
    for name in ("ttft", "tpot", "tbt", "itl", "e2e"):
        table.add_row(name.upper(), *_cells(getattr(summary, name)))
    for line in _lines(summary, cost):
        console.print(line, highlight=False, markup=False)
    console.print(table)


def _cells(values: Percentiles | None) -> list[str]:
    if values is None:
        return ["-"] * 6 + ["0"]
    shown = (values.p50, values.p90, values.p95, values.p99, values.high, values.mean)
    return [*(f"{value * 1e3:.4g}" for value in shown), str(values.count)]


def _lines(summary: Summary, cost: Cost) -> list[str]:
    lines = [
        f"{summary.completed} of {summary.requests} requests completed in {summary.duration:.3g} s: "
        f"{summary.requests_per_second:.3g} requests/s, {summary.prompt_tokens_per_second:.4g} prompt tokens/s, "
        f"{summary.output_tokens_per_second:.4g} output tokens/s"
    ]
    lines += [f"failed, {count} times: {error}" for error, count in summary.errors.items()]
    if summary.without_usage:
        lines.append(f"{summary.without_usage} replies came without token counts: not in TPOT, ITL and tokens/s")
    if summary.goodput is not None:
        lines.append(f"goodput: {summary.goodput:.3g} requests/s within the bounds")
    each = cost.microseconds_per_delivery
    late = summary.lateness.p99 * 1e3 if summary.lateness else 0.0
    lines.append(
        f"this client: {cost.cpu_seconds / cost.wall_seconds:.1%} of one CPU"
        + (f", {each:.0f} us per delivery" if each is not None else "")
        + f"; requests sent late by {late:.3g} ms (p99)"
    )
    return lines
