"""ChatTemplate: messages to the text a model was trained on, by the jinja2 template in its file.

Owns what templates of the Hugging Face kind may expect (names, functions, options) and how their failures read. Must
not know tokens, requests or which roles exist: the template decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2.exceptions import SecurityError, TemplateError, UndefinedError

from yeoul.errors import ModelFileError, RequestError
from yeoul.text.sandbox import BoundedEnvironment
from yeoul.text.vocabulary import read_id, read_strings

KEY: Final = "tokenizer.chat_template"
MAX_SOURCE: Final = 1 << 18
"""Characters of a template."""
MAX_OUTPUT: Final = 1 << 20
"""Characters that a template may write."""
MAX_MESSAGE: Final = 500
"""Characters of a template's own error message that are passed on."""
_GIVEN: Final = frozenset(("messages", "add_generation_prompt", "bos_token", "eos_token"))


class _RefusedError(Exception):
    """The template called raise_exception."""


class ChatTemplate:
    """A compiled template; `render` may be called from any thread.

    `now` tells the time to templates that write the date (`strftime_now`).
    Raises ModelFileError for a template that is too long or does not compile.
    """

    def __init__(self, source: str, *, bos: str, eos: str, now: Callable[[], datetime] = datetime.now) -> None:
        if len(source) > MAX_SOURCE:
            raise ModelFileError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are allowed")
        self.source = source
        self._bos = bos
        self._eos = eos
        self._environment = _environment(now)
        self._environment.start()  # compiling evaluates constants
        try:
            parsed = self._environment.parse(source)
            self._template = self._environment.from_string(self._environment.meter(parsed))
        # A hostile source can fail in jinja2's parser or in Python's own: RecursionError, SyntaxError, MemoryError.
        except Exception as error:
            raise ModelFileError(f"the chat template does not compile: {_one_line(error)}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text; `variables` are further names that the template may read (`enable_thinking`, ...).

        Raises RequestError with the template's own message where it refuses the messages, and with one line for every
        other failure.
        """
        for name in variables:
            if name in _GIVEN or name.startswith("_") or not name.isidentifier():
                raise RequestError(f"{name!r} cannot be given to a chat template", param="chat_template_kwargs")
        names = {
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }
        return self._run(names)

    def _run(self, names: Mapping[str, Any]) -> str:
        self._environment.start()
        try:
            return _collect(self._template.generate(names))
        except _RefusedError as error:
            raise RequestError(f"the model's chat template refuses: {_clip(str(error))}", param="messages") from None
        except RequestError:
            raise
        # Whatever a template does wrong is the fault of this request's messages or of the file, never of the engine.
        except Exception as error:
            raise RequestError(f"the chat template failed: {_one_line(error)}", param="messages") from None


def load_template(metadata: Mapping[str, object]) -> ChatTemplate | None:
    """The chat template of a GGUF file, or None for a model without one, with which one cannot chat.

    Raises ModelFileError for one that does not compile.
    """
    source = metadata.get(KEY)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelFileError(f"{KEY} is not a string")
    tokens = read_strings(metadata, "tokens")
    ids = (read_id(metadata, f"{name}_token_id", len(tokens)) for name in ("bos", "eos"))
    bos, eos = ("" if token_id is None else tokens[token_id] for token_id in ids)
    return ChatTemplate(source, bos=bos, eos=eos)


def _environment(now: Callable[[], datetime]) -> BoundedEnvironment:
    """The names that Hugging Face gives to templates."""

    def strftime_now(format: str) -> str:
        return now().strftime(format)

    environment = BoundedEnvironment()
    environment.replace_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object = "") -> NoReturn:
    raise _RefusedError(message)


def _collect(parts: Iterator[str]) -> str:
    out: list[str] = []
    size = 0
    for part in parts:
        size += len(part)
        if size > MAX_OUTPUT:
            raise RequestError(f"the chat template wrote more than {MAX_OUTPUT} characters", param="messages")
        out.append(part)
    return "".join(out)


def _one_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    if isinstance(error, (SecurityError, UndefinedError)):
        return _clip(str(error))
    if isinstance(error, TemplateError):
        line = getattr(error, "lineno", None)
        return _clip(f"{error.message or type(error).__name__}" + (f" (line {line})" if line else ""))
    return _clip(f"{type(error).__name__}: {error}")


def _clip(text: str) -> str:
    """One printable line of bounded length."""
    line = " ".join(text.split())
    clean = "".join(char if char.isprintable() else "\ufffd" for char in line)
    return clean if len(clean) <= MAX_MESSAGE else clean[: MAX_MESSAGE - 1] + "…"


__all__ = ["KEY", "MAX_OUTPUT", "MAX_SOURCE", "ChatTemplate", "load_template"]
