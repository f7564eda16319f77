"""yeoul generate: complete one prompt. Owns where the prompt comes from and how the reply is printed."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer

from yeoul.cli.failures import INTERRUPTED, UsageError
from yeoul.cli.options import ENGINE, SAMPLING, JsonFlag, LogLevel, ModelArgument, build, takes
from yeoul.cli.session import Reply, open_engine, reply_to
from yeoul.cli.terminal import interrupt_noted, write
from yeoul.config import EngineConfig
from yeoul.errors import RequestError
from yeoul.types import FinishReason, Request, SamplingParams

DEFAULTS = SAMPLING.with_defaults(max_tokens=256, temperature=0.0)


@takes(DEFAULTS, ENGINE.without("seed", "max_num_seqs", "max_waiting_tokens"))
def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Argument(help="The text to complete; `-` or none: stdin.")] = None,
    *,
    json: JsonFlag = False,
    log_level: LogLevel = "warning",
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Complete a prompt, as it is: no chat template.

    The reply streams to stdout. With --json it comes as one object instead: text, finish_reason, prompt_tokens,
    completion_tokens, ttft (seconds) and tokens_per_second (of the tokens after the first).
    """
    from yeoul.obs.logs import setup_logging

    params = build(SamplingParams, **sampling)
    config = build(EngineConfig, model=model, max_num_seqs=1, **engine)
    text = read_prompt(prompt)
    setup_logging(log_level)
    with open_engine(config) as opened:
        request = Request(request_id="generate", prompt_token_ids=opened.tokenizer.encode(text), params=params)
        with interrupt_noted() as interrupt:
            reply = reply_to(opened, request, interrupt, _keep_quiet if json else write)
    _finish(reply, model, json)


def read_prompt(argument: str | None) -> str:
    """The prompt: the argument, or all of stdin without its last line break."""
    if argument is not None and argument != "-":
        return argument
    if sys.stdin.isatty():
        raise UsageError("there is no prompt", hint="give it as an argument, or pipe it to stdin")
    text = sys.stdin.read()
    if not text:
        raise RequestError("the prompt on stdin is empty", hint="give it as an argument, or pipe it to stdin")
    return text.removesuffix("\n")


def _keep_quiet(text: str) -> None:
    """With --json nothing is shown before the end."""


def _finish(reply: Reply, model: str, json: bool) -> None:
    if json:
        print(msgspec.json.encode({"model": model, **msgspec.structs.asdict(reply)}).decode(), flush=True)
    elif not reply.text.endswith("\n"):
        write("\n")
    if reply.finish_reason is FinishReason.ABORT:
        raise typer.Exit(INTERRUPTED)
