"""yeoul bench: its commands, and `latency`'s flags and table; `cli/latency` owns what that one measures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from yeoul import __version__
from yeoul.cli import bench_probe, bench_serve, bench_throughput
from yeoul.cli.failures import UsageError
from yeoul.cli.options import ENGINE, JsonFlag, LogLevel, ModelArgument, build, takes
from yeoul.cli.session import open_engine
from yeoul.cli.terminal import Progress, interrupt_noted, progress
from yeoul.config import EngineConfig

if TYPE_CHECKING:
    from yeoul.cli.latency import CostOf, DecodeLatency, PromptLatency, Workload
    from yeoul.engine.loop import Engine
    from yeoul.lab.meter import Spread

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


app.command()(bench_probe.probe)
app.command()(bench_serve.serve)
app.command()(bench_throughput.throughput)


@app.callback()
def bench() -> None:
    """Measure speed on this machine."""


def parse_batches(text: str | tuple[int, ...]) -> tuple[int, ...]:
    """`1,8` as (1, 8); a default is one already."""
    if isinstance(text, tuple):
        return text
    try:
        batches = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,8") from None
    if min(batches) < 1 or len(set(batches)) < len(batches):
        raise typer.BadParameter("batches must be different numbers from 1 on")
    return batches


@app.command()
@takes(ENGINE.without("seed", "max_waiting_tokens"))
def latency(
    model: ModelArgument,
    *,
    json: JsonFlag = False,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the measured prompt.")] = 512,
    decode_tokens: Annotated[int, typer.Option(min=3, help="Tokens that each row decodes.")] = 64,
    context_tokens: Annotated[int, typer.Option(min=1, help="Prompt of each row that decodes.")] = 16,
    batch: Annotated[
        Any,
        typer.Option(
            parser=parse_batches,
            metavar="N,...",
            show_default="1,8",
            help="Rows that decode together, one run for each.",
        ),
    ] = (1, 8),
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each measurement, after a warm-up.")] = 5,
    log_level: LogLevel = "warning",
    engine: dict[str, Any],
) -> None:
    """Prompt speed, TTFT and decode speed of one model, with nothing else running.

    Figures are medians of the repeats, with the least and the greatest. A decode step gives one token to each row.
    GB/s counts the file's weights and the KV; "of probed" is their part of the rate at which a probe read as much,
    between the runs.
    """
    from yeoul.cli.latency import Workload
    from yeoul.obs.logs import setup_logging

    config = build(EngineConfig, model=model, **engine)
    if max(batch) > config.max_num_seqs:
        hint = f"give --max-num-seqs {max(batch)}"
        raise UsageError(f"--batch has {max(batch)} rows; --max-num-seqs is {config.max_num_seqs}", hint=hint)
    workload = Workload(
        prompt_tokens=prompt_tokens,
        context_tokens=context_tokens,
        decode_tokens=decode_tokens,
        batches=batch,
        repeats=repeats,
    )
    setup_logging(log_level)
    with open_engine(config) as opened, progress("bench latency", "runs") as show:
        about = opened.step_log.header
        prompt, decode, probed = _measure(opened, config, workload, show)
    _print_table(about.executor, prompt, decode, probed)
    if json:
        print(_as_json(model, msgspec.to_builtins(about), workload, prompt, decode, probed))


def _measure(
    engine: Engine, config: EngineConfig, workload: Workload, show: Progress
) -> tuple[PromptLatency, list[DecodeLatency], Spread]:
    """The workload's figures, and GB/s of the reads between its samples."""
    from yeoul.cli.latency import measure
    from yeoul.engine.build import resolve
    from yeoul.exec.native import choose_isa
    from yeoul.lab.meter import spread
    from yeoul.lab.probe import MIN_READ, ReadProbe

    cost_of = _cost_of(config)
    # As much as a step reads: so the part of it that stays in a cache is the same.
    size = max(MIN_READ, cost_of(1, workload.context_tokens).weight_bytes)
    memory = ReadProbe(choose_isa(config.isa)[0], resolve(config).num_threads, size)
    rates: list[float] = []
    with interrupt_noted() as interrupt:
        prompt, decode = measure(engine, workload, cost_of, show, interrupt, lambda: rates.append(memory.rate()))
    return prompt, decode, spread(rates)


def _cost_of(config: EngineConfig) -> CostOf:
    """The work of one decode step of the model's program, in the file's own bytes."""
    from yeoul.engine.build import resolve
    from yeoul.models.registry import load_model
    from yeoul.ops.cost import Cost, StepShape, program_cost, weight_sizes
    from yeoul.weights.catalogue import find_model
    from yeoul.weights.gguf import GGUFFile

    config = resolve(config)
    dtypes = {"k_dtype": config.kv_cache_dtype, "v_dtype": config.v_cache_dtype}
    model = load_model(GGUFFile.open(find_model(config.model)), **dtypes)
    sizes = weight_sizes(model.weights)

    def cost_of(rows: int, context: int) -> Cost:
        return program_cost(model.program, sizes, StepShape(((context, 1),) * rows, rows))

    return cost_of


def _as_json(
    model: str,
    about: dict[str, Any],
    workload: Workload,
    prompt: PromptLatency,
    decode: list[DecodeLatency],
    probed: Spread,
) -> str:
    parts = {
        "benchmark": "latency",
        "version": __version__,
        "model": model,
        "executor": about["executor"],
        "threads": about["config"]["num_threads"],
        "machine": about["machine"],
        "config": about["config"],
        "unix": about["unix"],
        "workload": workload,
        "prompt": prompt,
        "decode": decode,
        "probed_gigabytes_per_second": probed,
    }
    return msgspec.json.encode(parts).decode()


def _print_table(executor: str, prompt: PromptLatency, decode: Iterable[DecodeLatency], probed: Spread) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "tokens/s", "ms", "weights + KV, MB/token", "GB/s", "of probed")
    table.add_row(f"prompt {prompt.tokens}, TTFT", _show(prompt.tokens_per_second), _show(prompt.ttft, 1e3), "", "", "")
    for row in decode:
        size = f"{row.weight_bytes_per_token / 1e6:.1f} + {row.kv_bytes_per_token / 1e6:.1f}"
        speed, step = _show(row.tokens_per_second), _show(row.step, 1e3)
        rate = row.gigabytes_per_second.median
        table.add_row(f"decode {row.batch}, step", speed, step, size, _number(rate), f"{rate / probed.median:.0%}")
    console = Console(width=None if Console().is_terminal else 120)
    console.print(f"executor: {executor}", highlight=False)
    console.print(f"probed read bandwidth: {_show(probed)} GB/s", highlight=False)
    console.print(table)


def _show(spread: Spread, scale: float = 1.0) -> str:
    """`median (low-high)`."""
    numbers = [_number(value * scale) for value in (spread.median, spread.low, spread.high)]
    return f"{numbers[0]} ({numbers[1]}-{numbers[2]})"


def _number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
