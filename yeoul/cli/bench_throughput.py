"""yeoul bench throughput: the flags and the table; `lab/throughput` owns what is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from yeoul import __version__
from yeoul.cli.options import ENGINE, JsonFlag, LogLevel, ModelArgument, build, takes
from yeoul.cli.session import open_engine
from yeoul.cli.terminal import interrupt_noted, progress
from yeoul.config import EngineConfig
from yeoul.errors import ConfigError
from yeoul.lab.workload import Lengths, parse_lengths

if TYPE_CHECKING:
    from yeoul.lab.throughput import Batch, Throughput

DEFAULT = Lengths(128, 128)


def lengths(text: str | Lengths) -> Lengths:
    """`128` or `64-256`; a default is lengths already."""
    if isinstance(text, Lengths):
        return text
    try:
        return parse_lengths(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def _option(text: str) -> Any:
    return typer.Option(parser=lengths, metavar="N[-M]", show_default="128", help=text)


@takes(ENGINE.without("seed"))
def throughput(
    model: ModelArgument,
    *,
    prompts: Annotated[int, typer.Option(min=1, max=100_000, help="Prompts, all given at once.")] = 32,
    input_tokens: Annotated[Any, _option("Length of each prompt, or a range.")] = DEFAULT,
    output_tokens: Annotated[Any, _option("Tokens that each prompt generates, or a range.")] = DEFAULT,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of all prompts, after a warm-up.")] = 3,
    prompt_seed: Annotated[int, typer.Option(help="Same seed: same lengths and prompts.")] = 0,
    json: JsonFlag = False,
    log_level: LogLevel = "warning",
    engine: dict[str, Any],
) -> None:
    """Tokens per second of one model when all prompts are there at once, without a server.

    Figures are medians of the repeats, with the least and the greatest; a run lasts from its first step to its last.
    """
    from yeoul.lab.throughput import Batch, measure
    from yeoul.obs.logs import setup_logging

    config = build(EngineConfig, model=model, **engine)
    batch = Batch(
        prompts=prompts, input_tokens=input_tokens, output_tokens=output_tokens, repeats=repeats, seed=prompt_seed
    )
    setup_logging(log_level)
    with open_engine(config) as opened, progress("bench throughput", "runs") as show:
        about = opened.step_log.header
        with interrupt_noted() as interrupt:
            result = measure(opened, batch, show, lambda: interrupt.pressed)
    _print_table(about.executor, result)
    if json:
        print(_as_json(model, msgspec.to_builtins(about), batch, result))


def _as_json(model: str, about: dict[str, Any], batch: Batch, result: Throughput) -> str:
    parts = {
        "benchmark": "throughput",
        "version": __version__,
        "model": model,
        "executor": about["executor"],
        "threads": about["config"]["num_threads"],
        "machine": about["machine"],
        "config": about["config"],
        "unix": about["unix"],
        "workload": batch,
        "result": result,
    }
    return msgspec.json.encode(parts).decode()


def _print_table(executor: str, result: Throughput) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "tokens", "tokens/s", "least", "greatest")
    tokens = {"prompt": result.prompt_tokens, "output": result.output_tokens}
    tokens["total"] = sum(tokens.values())
    for name, count in tokens.items():
        rate = getattr(result, f"{name}_tokens_per_second")
        table.add_row(name, str(count), *(f"{value:.4g}" for value in (rate.median, rate.low, rate.high)))
    console = Console(width=None if Console().is_terminal else 120)
    console.print(f"executor: {executor}", highlight=False)
    console.print(table)
