"""yeoul chat: a conversation in the terminal, or over pipes, one message a line. Owns what was said, and commands."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from yeoul.cli.failures import say_error
from yeoul.cli.options import ENGINE, SAMPLING, LogLevel, ModelArgument, build, takes
from yeoul.cli.session import open_engine, reply_to
from yeoul.cli.terminal import interrupt_noted, write
from yeoul.config import EngineConfig
from yeoul.errors import RequestError
from yeoul.types import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from yeoul.engine.loop import Engine
    from yeoul.text.template import ChatTemplate

DEFAULTS = SAMPLING.with_defaults(max_tokens=None, temperature=0.7)
HELP = "Ctrl-C stops a reply, /reset forgets the conversation, /quit or Ctrl-D leaves"


@takes(DEFAULTS, ENGINE.without("seed", "max_num_seqs", "max_waiting_tokens"))
def chat(
    model: ModelArgument,
    *,
    system: Annotated[str | None, typer.Option(help="Instructions that come before the conversation.")] = None,
    log_level: LogLevel = "warning",
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk to a model; it remembers the conversation. Works in pipes too: one message a line.

    Ctrl-C stops a reply. /reset forgets the conversation. /quit or Ctrl-D leaves.
    """
    from yeoul.obs.logs import setup_logging

    params = build(SamplingParams, **sampling)
    config = build(EngineConfig, model=model, max_num_seqs=1, **engine)
    setup_logging(log_level)
    with open_engine(config) as opened:
        _talk(Conversation(opened, _template(opened, model), params, system))


class Conversation:
    """What was said, and the engine that answers."""

    def __init__(self, engine: Engine, template: ChatTemplate, params: SamplingParams, system: str | None) -> None:
        from yeoul.text.chat import ChatEncoder

        self._engine = engine
        self._encoder = ChatEncoder(engine.tokenizer, template)
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._count = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system's instructions."""
        self._messages = list(self._start)

    def answer(self, message: str) -> bool:
        """Answer a message, writing the reply to stdout; False if Ctrl-C cut it short. What was written is remembered.

        Raises RequestError (a conversation over the context, a template that refuses); then nothing is remembered.
        """
        messages = [*self._messages, {"role": "user", "content": message}]
        token_ids = self._encoder.encode(messages).token_ids
        self._count += 1
        request = Request(request_id=f"chat-{self._count}", prompt_token_ids=token_ids, params=self._params)
        with interrupt_noted() as interrupt:
            reply = reply_to(self._engine, request, interrupt, write)
        if not reply.text.endswith("\n"):
            write("\n")
        self._messages = [*messages, {"role": "assistant", "content": reply.text}]
        return reply.finish_reason is not FinishReason.ABORT


def _template(engine: Engine, model: str) -> ChatTemplate:
    from yeoul.text.template import load_template

    template = load_template(engine.metadata)
    if template is None:
        raise RequestError(f"{model} has no chat template, so it cannot chat", hint=f"yeoul generate {model}")
    return template


def _talk(conversation: Conversation) -> None:
    """Until the input ends. Whoever types can go on after an error; a pipe ends with it."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (editing of lines in input())

        print(HELP, file=sys.stderr)
    while (line := _read(interactive)) is not None:
        message = line.strip()
        if message == "/quit":
            return
        if message == "/reset":
            conversation.reset()
        elif message:
            _answer(conversation, message, interactive)


def _answer(conversation: Conversation, message: str, interactive: bool) -> None:
    try:
        finished = conversation.answer(message)
    except RequestError as error:
        if not interactive:
            raise
        say_error(str(error), error.hint or "/reset forgets the conversation")
        return
    if not finished and not interactive:
        raise KeyboardInterrupt


def _read(interactive: bool) -> str | None:
    """The next line; None at the end."""
    if not interactive:
        return sys.stdin.readline() or None
    try:
        return input("> ")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print(f"\n{HELP}", file=sys.stderr)
        return ""
