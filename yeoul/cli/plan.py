"""yeoul plan: what a model takes and what fits. Owns the flags and the screen; `lab/plan` owns the answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from yeoul import __version__
from yeoul.cli.options import ENGINE, JsonFlag, ModelArgument, build, parse_size, takes
from yeoul.config import EngineConfig
from yeoul.kv.sizing import human

if TYPE_CHECKING:
    from yeoul.lab.ceiling import Ceiling
    from yeoul.lab.plan import KVPool, Plan

SIZING = ENGINE.only(
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "v_cache_dtype",
    "kv_cache_memory",
    "num_kv_blocks",
)
GIGA, TERA = 1e9, 1e12
WIDTH = 120
"""Where there is no terminal."""


@takes(SIZING)
def plan(
    model: ModelArgument,
    *,
    json: JsonFlag = False,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt of every request.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output of every request.")] = 128,
    memory: Annotated[
        Any,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            show_default="the KV pool that the engine would take here",
            help="What weights, activations and KV may take together, e.g. 4GiB.",
        ),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="GB/s", help="Bytes that the machine reads per second, in 10^9.")
    ] = None,
    ops: Annotated[
        float | None, typer.Option(metavar="TOP/s", help="Operations per second, in 10^12; a multiply-add is two.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every formula with its numbers.")] = False,
    engine: dict[str, Any],
) -> None:
    """What a model takes in memory, how many requests fit, and how fast this machine could be at most.

    Only the header of the model's file is read. The sums are those that size the engine.
    """
    from yeoul.lab.ceiling import Machine
    from yeoul.lab.plan import PlanRequest, make_plan

    machine = build(Machine, bandwidth=_scaled(bandwidth, GIGA), ops=_scaled(ops, TERA))
    made = make_plan(
        build(
            PlanRequest,
            config=build(EngineConfig, model=model, **engine),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            memory=memory,
            machine=machine,
        )
    )
    _print(made, explain)
    if json:
        print(msgspec.json.encode(msgspec.to_builtins(made) | {"version": __version__}).decode())


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _print(made: Plan, explain: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else WIDTH, highlight=False)
    table = Table("memory", "what", show_footer=True)
    table.columns[0].footer, table.columns[1].footer = "total", "Python itself comes on top"
    table.add_column("size", footer=human(made.total_bytes), justify="right", no_wrap=True)
    for row in _memory(made):
        table.add_row(*row)
    console.print(f"{made.model}: {made.architecture}, context of {made.context} tokens", markup=False)
    console.print(table)
    for line in _fits(made):
        console.print(line, markup=False, soft_wrap=True)
    if made.prefill is not None:
        console.print(_ceilings(made))
    if explain:
        for line in made.formulas:
            console.print(f"- {line}", markup=False, soft_wrap=True)


def _memory(made: Plan) -> Iterator[tuple[str, str, str]]:
    """Rows of the table: part, explanation, size."""
    for one in made.encodings:
        what = f"{human(one.file_bytes)} in the file, tensors: {one.tensors}"
        yield f"weights, {one.name}", what, human(one.packed_bytes)
    for pool in made.kv:
        yield f"KV, {_kind(pool)}", _pool(pool), human(pool.num_blocks * pool.block_bytes)
    yield "activations", f"--max-num-batched-tokens {made.max_num_batched_tokens}", human(made.activation_bytes)
    yield "logits", "a tile of rows", human(made.logit_bytes)
    yield "rope tables", f"at most; --max-model-len {made.max_model_len}", human(made.rope_bytes)


def _kind(pool: KVPool) -> str:
    return f"window of {pool.window}" if pool.window else "full"


def _pool(pool: KVPool) -> str:
    dtype = pool.k_dtype if pool.k_dtype == pool.v_dtype else f"{pool.k_dtype}/{pool.v_dtype}"
    return f"layers: {pool.layers}, {dtype}, {human(pool.bytes_per_token)}/token, {pool.num_blocks} blocks"


def _fits(made: Plan) -> Iterator[str]:
    yield f"tokens: {made.kv_tokens} in the KV cache, {made.max_model_len} in one sequence"
    yield f"requests of {made.request_tokens} tokens side by side: {made.requests} (limit: {made.limited_by})"
    if made.memory is not None:
        yield (
            f"memory: {human(made.total_bytes)} of {human(made.memory)}; "
            f"`yeoul serve` takes --kv-cache-memory {made.kv_cache_memory} instead of --memory"
        )
    if made.prefill is None:
        yield "speed: give --bandwidth GB/s and --ops TOP/s (see `yeoul bench probe`) for its ceilings"


def _ceilings(made: Plan) -> Any:
    from rich.table import Table

    table = Table("at most", "tokens/s", "ms", "weights + KV", "limit")
    for one in made.decode:
        table.add_row(f"decode, {one.rows} x {one.context} tokens", *_speed(one))
    if made.prefill is not None:
        table.add_row(f"prefill, {made.prefill.tokens} tokens", *_speed(made.prefill))
    return table


def _speed(one: Ceiling) -> tuple[str, ...]:
    moved = f"{human(one.weight_bytes)} + {human(one.kv_bytes)}"
    return f"{one.tokens_per_second:.4g}", f"{one.seconds * 1e3:.3g}", moved, one.bound
