"""Flags made from configuration structs: one table per struct, used by every command that takes it.

Owns the words and the grouping of flags; names, defaults and ranges are the structs' own. Must not know commands.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from yeoul.cli.failures import UsageError
from yeoul.config import (
    BATCHINGS,
    EXECUTORS,
    ISAS,
    KV_ALLOCATIONS,
    KV_CHOICES,
    PREEMPTION_MODES,
    PREEMPTION_VICTIMS,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from yeoul.errors import YeoulError
from yeoul.server.options import GENERATION_CONFIGS, ServerOptions
from yeoul.server.replies.reader import REASONING_PARSERS, TOOL_CALL_PARSERS
from yeoul.types import MAX_STOP_STRINGS, SamplingParams

Command = Callable[..., None]
S = TypeVar("S", bound=msgspec.Struct)

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

ModelArgument = Annotated[str, typer.Argument(help="A name that `yeoul pull` lists, or the path of a .gguf file.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]


def parse_size(text: str | int) -> int:
    """Bytes of `1048576`, `512M`, `2GiB`, `1.5g` (powers of 1024); a default is a number already."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 1048576, 512M or 2GiB")
    return int(float(match[1]) * UNITS[match[2]]) if match[2] else int(float(match[1]))


@dataclass(frozen=True)
class Flag:
    """One field of a struct as `--its-name`."""

    field: str
    kind: Any
    help: str
    shown: str | bool = True
    """The default as help shows it, where the value itself says nothing (0: choose)."""
    metavar: str | None = None
    parser: Callable[[Any], Any] | None = None
    panel: str | None = None
    """Instead of the group's."""

    def parameter(self, group: Group) -> inspect.Parameter:
        """What typer makes an option of."""
        name = self.field.replace("_", "-")
        is_on = self.kind is bool and group.default(self.field)
        option = typer.Option(
            f"--{name}/--no-{name}" if is_on else f"--{name}",
            help=self.help,
            show_default=self.shown,
            metavar=self.metavar,
            parser=self.parser,
            rich_help_panel=self.panel or group.panel,
        )
        annotation: Any = Annotated[self.kind, option]
        return inspect.Parameter(
            self.field, inspect.Parameter.KEYWORD_ONLY, default=group.default(self.field), annotation=annotation
        )


@dataclass(frozen=True)
class Group:
    """The flags of one struct. A command gets their values as one dictionary, in the parameter `name`."""

    name: str
    struct: type[msgspec.Struct]
    panel: str
    flags: tuple[Flag, ...]
    defaults: tuple[tuple[str, Any], ...] = ()
    """Where a command wants other defaults than the struct's."""

    def default(self, field: str) -> Any:
        """The default value of a field's flag."""
        own = {info.name: info.default for info in msgspec.structs.fields(self.struct)}
        value = (own | dict(self.defaults))[field]
        return list(value) if isinstance(value, tuple) else value

    def without(self, *fields: str) -> Group:
        """The group with fewer flags."""
        return replace(self, flags=tuple(flag for flag in self.flags if flag.field not in fields))

    def only(self, *fields: str) -> Group:
        """The group with these flags."""
        return replace(self, flags=tuple(flag for flag in self.flags if flag.field in fields))

    def with_defaults(self, **defaults: Any) -> Group:
        """The group with other defaults."""
        return replace(self, defaults=(*self.defaults, *defaults.items()))

    def left_to_model(self, *fields: str, **otherwise: float) -> Group:
        """The group with None for fields that the model file may know better, and what help says of them.

        `otherwise`: what holds where it knows nothing, if that is not the struct's own default.
        """
        shown = {name: f"the model file's, else {otherwise.get(name, self.default(name)):g}" for name in fields}
        flags = (
            replace(flag, kind=flag.kind | None, shown=shown[flag.field]) if flag.field in shown else flag
            for flag in self.flags
        )
        return replace(self, flags=tuple(flags)).with_defaults(**dict.fromkeys(fields))


ENGINE = Group(
    "engine",
    EngineConfig,
    "Engine",
    (
        Flag("max_model_len", int, "Longest sequence, prompt and output together.", "the model's own context"),
        Flag("max_num_seqs", int, "Sequences that run at the same time."),
        Flag("max_num_batched_tokens", int, "Token budget of one step.", "512"),
        Flag("max_waiting_tokens", int, "Prompt tokens that may wait before requests are refused.", "64 contexts"),
        Flag("kv_cache_dtype", str, "How keys and values are stored.", "f16", f"[{'|'.join(KV_CHOICES)}]"),
        Flag("v_cache_dtype", str, "How values are stored, if not as keys.", "as keys", f"[{'|'.join(KV_CHOICES)}]"),
        Flag(
            "kv_cache_memory",
            int,
            "Size of the KV pool, e.g. 2GiB.",
            "max_num_seqs contexts, at most 25 % of free memory",
            "SIZE",
            parse_size,
        ),
        Flag("num_kv_blocks", int, "Blocks of the KV pool, instead of its size; for experiments.", False),
        *(
            Flag(field, kind, text, metavar=f"[{'|'.join(values)}]" if values else None, panel="Techniques")
            for field, kind, text, values in (
                ("enable_prefix_caching", bool, "Share the KV of equal beginnings of prompts.", ()),
                ("fork", bool, "Compute the prompt of n sequences once.", ()),
                ("batching", str, "When a waiting request may join those that run.", BATCHINGS),
                ("scheduling_policy", str, "Who is admitted first.", SCHEDULING_POLICIES),
                ("ageing_seconds", float, "After this time a request comes before all younger ones.", ()),
                ("kv_allocation", str, "How many KV blocks a request holds.", KV_ALLOCATIONS),
                ("preemption_victim", str, "Who goes back to the queue when blocks run out.", PREEMPTION_VICTIMS),
                ("preemption_mode", str, "What becomes of its KV.", PREEMPTION_MODES),
            )
        ),
        Flag("swap_space", int, "Most swapped-out KV.", "the KV pool's size", "SIZE", parse_size, "Techniques"),
        Flag("swap_dir", str, "Folder for swapped-out KV.", "memory", "FOLDER", panel="Techniques"),
        Flag("num_threads", int, "Threads that compute.", "as many as this process may use"),
        Flag("executor", str, "What computes; the reference ones are slow oracles.", True, f"[{'|'.join(EXECUTORS)}]"),
        Flag("isa", str, "Kernel level.", "YEOUL_ISA, else the best here", f"[{'|'.join(ISAS)}]"),
        Flag("seed", int, "Seeds the seeds of requests that bring none.", "random"),
        Flag("step_log", str, "File that gets one JSON line per step and event.", False, "FILE"),
    ),
)

SERVER = Group(
    "server",
    ServerOptions,
    "Server",
    (
        Flag("host", str, "Address to listen on."),
        Flag("port", int, "Port to listen on; 0: any free one."),
        Flag("insecure", bool, "Allow an address that other machines can reach without a key."),
        Flag(
            "api_key",
            list[str],
            "Key that requests must bring; may be given more than once. YEOUL_API_KEY (comma separated) does the same "
            "and is not seen in lists of processes.",
            "no key is wanted",
            "KEY",
        ),
        Flag(
            "cors_origin", list[str], "Web pages of this origin may use the server; may be given again.", False, "URL"
        ),
        Flag("ssl_certfile", str, "Serve HTTPS with this certificate chain (PEM).", False, "FILE"),
        Flag("ssl_keyfile", str, "Its private key.", False, "FILE"),
        Flag("chat_template", str, "Chat template (jinja2) instead of the model's own.", False, "FILE"),
        Flag(
            "tool_call_parser",
            str,
            "How the model writes tool calls.",
            "by its chat template",
            f"[{'|'.join(TOOL_CALL_PARSERS)}]",
        ),
        Flag(
            "reasoning_parser",
            str,
            "How the model writes its reasoning.",
            "by its chat template",
            f"[{'|'.join(REASONING_PARSERS)}]",
        ),
        Flag(
            "generation_config",
            str,
            "Whose sampling defaults hold: the model file's, where it has some, or the API's own.",
            metavar=f"[{'|'.join(GENERATION_CONFIGS)}]",
        ),
        Flag("shutdown_timeout", float, "Seconds that running requests may take after the first SIGTERM or Ctrl-C."),
        Flag("access_log", bool, "Log every HTTP request."),
        Flag("metrics_prefix", str, "First part of the names in /metrics; `vllm` fits existing dashboards."),
        Flag("otlp_traces_endpoint", str, "Send OpenTelemetry spans of requests there (OTLP/HTTP).", False, "URL"),
        Flag("health_timeout", float, "Seconds without progress of the engine after which /health fails."),
        *(
            Flag(field, kind, text, panel="Limits", parser=parse_size if field.endswith("bytes") else None)
            for field, kind, text in (
                ("max_body_bytes", int, "Largest request body."),
                ("max_header_bytes", int, "Largest request line and header fields together."),
                ("max_header_fields", int, "Most header fields."),
                ("header_timeout", float, "Seconds until the header must be here."),
                ("body_timeout", float, "Seconds until the body must be here."),
                ("write_timeout", float, "Seconds after which a client that reads nothing is dropped."),
                ("keep_alive_timeout", float, "Seconds that an idle connection stays open."),
                ("max_prompts", int, "Most prompts in one completions request."),
                ("max_sequences", int, "Most prompts times n."),
                ("max_messages", int, "Most messages in one chat request."),
            )
        ),
    ),
)

SAMPLING = Group(
    "sampling",
    SamplingParams,
    "Sampling",
    (
        Flag("max_tokens", int | None, "Most tokens to generate.", "the rest of the context"),
        Flag("temperature", float, "0: always the likeliest token."),
        Flag("top_p", float, "Sample from the likeliest tokens that together have this probability; 1: off."),
        Flag("top_k", int, "Sample from this many likeliest tokens; 0: off."),
        Flag("min_p", float, "Drop tokens below this part of the likeliest one's probability; 0: off."),
        Flag("frequency_penalty", float, "Lower a token's logit by this for each time it was generated."),
        Flag("presence_penalty", float, "Lower the logit of every generated token by this, once."),
        Flag("repetition_penalty", float, "Divide the logits of tokens in prompt and output by this; 1: off."),
        Flag("min_tokens", int, "Do not end before this many tokens."),
        Flag("seed", int | None, "Same seed, same output.", "random"),
        Flag("stop", list[str], f"End before this text; may be given up to {MAX_STOP_STRINGS} times.", False),
        Flag("ignore_eos", bool, "Go on after the model's own end."),
    ),
)


def takes(*groups: Group) -> Callable[[Command], Command]:
    """Give a command the flags of some groups, in place of its parameters of the groups' names."""

    def decorate(command: Command) -> Command:
        names = {group.name for group in groups}
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in names]
        made = [flag.parameter(group) for group in groups for flag in group.flags]

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            for group in groups:
                values[group.name] = {flag.field: values.pop(flag.field) for flag in group.flags}
            command(**values)

        parameters = [*own, *made]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def build(struct: type[S], **values: Any) -> S:
    """A struct from flags. Raises UsageError, naming the flag, for a value that the struct refuses."""
    try:
        return struct(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except YeoulError as error:
        message = str(error)
        for name in values:
            message = re.sub(rf"(?<![\w-]){name}(?![\w-])", "--" + name.replace("_", "-"), message)
        raise UsageError(message, hint=error.hint, param=error.param) from None


def check_log_level(level: str) -> str:
    """Callback of --log-level."""
    if level not in LOG_LEVELS:
        raise typer.BadParameter(f"{level!r} is not one of {', '.join(LOG_LEVELS)}")
    return level


LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level", metavar=f"[{'|'.join(LOG_LEVELS)}]", callback=check_log_level, help="What is logged on stderr."
    ),
]


def check_log_format(form: str) -> str:
    """Callback of --log-format."""
    if form not in LOG_FORMATS:
        raise typer.BadParameter(f"{form!r} is not one of {', '.join(LOG_FORMATS)}")
    return form


LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format", metavar=f"[{'|'.join(LOG_FORMATS)}]", callback=check_log_format, help="How log lines look."
    ),
]
