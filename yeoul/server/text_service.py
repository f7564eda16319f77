"""TextService: tokenizer and chat template, used off the event loop. Owns the thread pool and the refusal of texts
that are too long to be worth tokenizing; must not know HTTP, JSON or the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from yeoul.errors import ContextLengthError, RequestError
from yeoul.types import Structured

CHARACTERS_PER_TOKEN = 64
"""A text with more characters than this for every token of the context cannot fit; real text has three to five."""
NUM_THREADS = 2

T = TypeVar("T")


class Tokenizer(Protocol):
    """What the server needs of yeoul.text.tokenizer."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end a reply."""
        ...

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        ...

    def token_text(self, token_id: int) -> str:
        """A token's name for people, special tokens included."""
        ...


class ChatPrompt(Protocol):
    """A conversation as text and as token ids."""

    @property
    def text(self) -> str:
        """As the template wrote it."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Ready to be continued."""
        ...


class ChatEncoder(Protocol):
    """What the server needs of yeoul.text.chat."""

    @property
    def source(self) -> str:
        """The template's own text."""
        ...

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Render and tokenize. Raises RequestError where the template refuses the messages."""
        ...


class Grammars(Protocol):
    """What the server needs of yeoul.text.grammar."""

    def start(self, structured: Structured) -> object:
        """Compile; RequestError where that cannot be."""
        ...


class TextService:
    """Turns prompts and conversations into token ids in a small pool of threads.

    `chat` is None where the model has no chat template: then every chat is refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatEncoder | None,
        *,
        max_model_len: int,
        grammars: Grammars | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._grammars = grammars
        self._max_model_len = max_model_len
        self._max_characters = max_model_len * CHARACTERS_PER_TOKEN
        self._end_ids = frozenset(tokenizer.end_ids)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="yeoul-text")

    async def encode(self, prompt: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a completions prompt, BOS included where the model wants one.

        Raises ContextLengthError for a text that cannot fit.
        """
        self._check_length(len(prompt))
        return await self._run(lambda: self._tokenizer.encode(prompt, add_special=add_special))

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of tokens, special ones by name."""
        return await self._run(lambda: self._tokenizer.decode(token_ids, skip_special=False))

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """A conversation, ready to be continued. `options`: those of ChatEncoder.encode.

        Raises RequestError where the model has no template or the template refuses the messages, ContextLengthError
        for a text that cannot fit.
        """
        chat = self._chat
        if chat is None:
            raise RequestError(
                "this model has no chat template, so it cannot chat",
                hint="use /v1/completions, or serve a model that has a template",
                param="messages",
            )
        self._check_length(sum(len(message["content"]) for message in messages))
        prompt = await self._run(lambda: chat.encode(messages, **options))
        self._check_length(len(prompt.text))
        return prompt

    async def check_structured(self, structured: Structured | None) -> None:
        """Compile a grammar, so that the engine finds it ready. Raises RequestError where that cannot be done."""
        if structured is None:
            return
        grammars = self._grammars
        if grammars is None:
            raise RequestError("there is no structured output here", param=structured.param)
        await self._run(lambda: grammars.start(structured))

    async def bad_word_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The token sequences of bad words."""
        # Here, so that the server's own modules load nothing of the text room.
        from yeoul.text.bad_words import bad_word_ids

        return await self._run(lambda: bad_word_ids(self._tokenizer, words)) if words else ()

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text that tokens add up to; special ones add nothing."""
        return b"".join(self.token_bytes(token_id) for token_id in token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the output's text: none for a token that ends a reply."""
        return b"" if token_id in self._end_ids else self._tokenizer.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """A token's name for people."""
        return self._tokenizer.token_text(token_id)

    def describe(self) -> dict[str, Any]:
        """What /tokenizer_info answers."""
        tokenizer = self._tokenizer
        names = {
            f"{name}_token": None if token_id is None else self.token_text(token_id)
            for name, token_id in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id))
        }
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": self._max_model_len,
            "add_bos_token": tokenizer.adds_bos,
            **names,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "end_token_ids": sorted(self._end_ids),
            "chat_template": None if self._chat is None else self._chat.source,
        }

    def close(self) -> None:
        """Stop the threads; work that waits is dropped. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, num_characters: int) -> None:
        if num_characters > self._max_characters:
            raise ContextLengthError(
                f"the prompt has {num_characters} characters; a context of {self._max_model_len} tokens "
                f"holds at most {self._max_characters}",
                hint=f"shorten the prompt by {num_characters - self._max_characters} characters",
            )

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
