"""The list of commands. Owns names, order and `--version`; must not know what a command does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from yeoul import __version__
from yeoul.cli import bench, chat, generate, plan, pull, serve
from yeoul.cli.terminal import prepare_streams

CONTEXT = {"help_option_names": ["--help", "-h"], "max_content_width": 120}

app = typer.Typer(
    name="yeoul",
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings=CONTEXT,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"yeoul {__version__}")
        raise typer.Exit


@app.callback()
def yeoul(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Yeoul serves language models on ordinary CPUs.

    MODEL is a name that `yeoul pull` lists, or the path of a .gguf file.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(serve.serve)
app.command()(chat.chat)
app.command()(generate.generate)
app.command()(pull.pull)
app.command()(plan.plan)
app.add_typer(bench.app, name="bench", help="Measure speed on this machine.")


def run(args: Sequence[str] | None) -> int:
    """Run one command; returns the exit code. Raises what the command raises.

    Not by the command's own `main`, which turns a broken pipe into an exit code of its own.
    """
    prepare_streams()
    command = get_command(app)
    with command.make_context("yeoul", list(sys.argv[1:] if args is None else args)) as context:
        command.invoke(context)
    return 0
