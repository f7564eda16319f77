"""Grammars: what structured output may continue with, token by token, through llguidance.

Owns the compiling of schemas, expressions and grammars under limits, a capped cache of them, and the view of our
vocabulary that llguidance needs. Must not know requests, sampling or the server. llguidance is imported on first use.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from yeoul.errors import EngineError, RequestError
from yeoul.text.tokenizer import Tokenizer
from yeoul.types import Structured, StructuredKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHED_GRAMMARS: Final = 32
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between the parts of JSON; bounded, as small models can go on with spaces for ever."""
MAX_LEXER_STATES: Final = 20_000
"""Of one grammar: up to 2 kB each."""
MAX_GRAMMAR_SIZE: Final = 100_000
"""Symbols of one grammar."""


class Grammar:
    """Where one sequence stands in its grammar. Used by one thread."""

    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes

    def mask(self) -> bytes:
        """The ids that may come next, as PlanRow.mask has them; end tokens where the output may end.

        Raises EngineError where a limit is hit.
        """
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask[: self._mask_bytes]

    def advance(self, token_ids: Iterable[int]) -> None:
        """Take in what was sampled. Raises EngineError for a token that the mask did not allow."""
        self._matcher.consume_tokens(list(token_ids))
        self._check()

    @property
    def is_finished(self) -> bool:
        """Nothing may follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}")


class GrammarCompiler:
    """Compiles what requests ask for. Any thread may call any method."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: width of the logits, at least that of the tokenizer."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._view_lock = threading.Lock()
        self._view: LLTokenizer | None = None
        self._compiled: OrderedDict[Structured, LLMatcher] = OrderedDict()

    def start(self, structured: Structured) -> Grammar:
        """A grammar at its beginning; compiled, which may take a second, unless it was lately used.

        Raises RequestError, with llguidance's own explanation, for what cannot be compiled within the limits.
        """
        with self._lock:
            matcher = self._compiled.get(structured)
        if matcher is None:
            # Without the lock: nobody who wants what is ready waits for this.
            matcher = self._compile(structured)
        with self._lock:
            self._compiled[structured] = matcher
            self._compiled.move_to_end(structured)
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return Grammar(matcher.deep_copy(), -(-self._vocab_size // 32) * 4)

    def _compile(self, structured: Structured) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, max_grammar_size=MAX_GRAMMAR_SIZE)
        matcher = LLMatcher(self._tokens(), _grammar_text(structured), log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(structured, matcher.get_error())
        return matcher

    def _tokens(self) -> LLTokenizer:
        """The vocabulary as llguidance needs it: made once, in about a second."""
        with self._view_lock:
            if self._view is None:
                self._view = _tokenizer_view(self._tokenizer, self._vocab_size)
            return self._view


def _grammar_text(structured: Structured) -> str:
    from llguidance import LLMatcher

    match structured.kind:
        case StructuredKind.JSON:
            try:
                return LLMatcher.grammar_from_json_schema(
                    structured.source, overrides={"whitespace_pattern": WHITESPACE}
                )
            except ValueError as error:
                raise _refusal(structured, str(error)) from error
        case StructuredKind.REGEX:
            return LLMatcher.grammar_from_regex(structured.source)
        case StructuredKind.CHOICE:
            choices = " | ".join(json.dumps(choice) for choice in json.loads(structured.source))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case StructuredKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(structured.source)


def _refusal(structured: Structured, why: str) -> RequestError:
    return RequestError(
        f"the {structured.kind} cannot be used: {_one_line(why)}",
        hint="grammars are llguidance's: its variant of Lark, Rust's regular expressions, most of JSON Schema",
        param=structured.param,
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


class _View:
    """A tokenizer as llguidance asks for it. Ids past the vocabulary are empty and so never allowed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        known = range(min(tokenizer.vocab_size, vocab_size))
        self.eos_token_id = min(tokenizer.end_ids) if tokenizer.eos_id is None else tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i, skip_special=False) for i in known]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self.special_token_ids = [i for i in known if tokenizer.is_special(i)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special=False)


def _tokenizer_view(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.end_ids:
        raise RequestError("this model has no end token, so it cannot have structured output", param="response_format")
    view = _View(tokenizer, vocab_size)
    ends = [view.eos_token_id, *sorted(tokenizer.end_ids - {view.eos_token_id})]
    return LLTokenizer(TokenizerWrapper(view), n_vocab=vocab_size, eos_token=ends)
