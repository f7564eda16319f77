"""yeoul bench probe: the flags and the table; `lab/probe` owns what is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from yeoul import __version__
from yeoul.cli.options import JsonFlag
from yeoul.cli.terminal import progress

if TYPE_CHECKING:
    from yeoul.lab.probe import ProbeReport


def probe(
    *,
    num_threads: Annotated[
        int, typer.Option(min=0, max=1024, show_default="as many as this process may use", help="Most threads.")
    ] = 0,
    isa: Annotated[str, typer.Option(show_default="YEOUL_ISA, else the best here", help="Kernel level.")] = "auto",
    json: JsonFlag = False,
) -> None:
    """What this machine can do at most: read rates of caches and memory, arithmetic peaks, 4-bit products.

    Every figure is the best of several tries. Takes some seconds, and up to 2 GiB of memory.
    """
    from yeoul.engine.machine import available_cpus, describe_machine
    from yeoul.exec.native import choose_isa
    from yeoul.lab.probe import probe as run

    level, _ = choose_isa(isa)
    with progress("bench probe", "parts") as show:
        report = run(level, num_threads or available_cpus(), show)
    _print_tables(report)
    if json:
        about = {"benchmark": "probe", "version": __version__, "machine": describe_machine()}
        print(msgspec.json.encode(about | msgspec.to_builtins(report)).decode())


def _print_tables(report: ProbeReport) -> None:
    from rich.console import Console
    from rich.table import Table

    reads = Table("read", "MB", "threads", "pages", "GB/s")
    for rate in report.reads:
        page = "4 KiB" if rate.page_bytes < 1 << 20 else "2 MiB"
        reads.add_row(rate.level, f"{rate.megabytes:.3g}", str(rate.threads), page, f"{rate.gigabytes_per_second:.1f}")
    peaks = Table("peak", "int8, TOP/s", "float32, TFLOP/s")
    for peak in report.peaks:
        peaks.add_row(f"{peak.threads} threads", f"{peak.int8:.3g}", f"{peak.float32:.3g}")
    gemm = Table("4-bit matrix", "ms", "GB/s", "TOP/s")
    for row in report.gemm:
        speed = (row.milliseconds, row.gigabytes_per_second, row.tera_operations_per_second)
        gemm.add_row(f"{row.rows} rows", *(f"{value:.3g}" for value in speed))
    console = Console(width=None if Console().is_terminal else 120)
    console.print(f"kernels: {report.isa}", highlight=False)
    for table in (reads, peaks, gemm):
        console.print(table)
