"""ChatEncoder: a conversation to token ids. Owns how template and tokenizer work together: which control texts count,
where a message that is to be continued ends. Must not know requests, HTTP or what the options were asked by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from yeoul.errors import RequestError
from yeoul.text.template import ChatTemplate
from yeoul.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, ready to be continued."""

    text: str
    token_ids: list[int]


class ChatEncoder:
    """May be used from any thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @property
    def source(self) -> str:
        """The template's own text."""
        return self._template.source

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Render and tokenize. Control texts become tokens where the template wrote them; in what the client sent
        (messages, tools, variables) they stay text.

        `continue_final_message`: end inside the last message, after its content, so that the model goes on with it.
        Raises RequestError where the template refuses the messages.
        """
        given = {"messages": list(messages), "tools": tools and list(tools), "variables": dict(variables or {})}
        hidden, stand_ins = self._tokenizer.controls.hide(given, self._template.source)
        rendered = self._template.render(
            hidden["messages"],
            add_generation_prompt=add_generation_prompt,
            tools=hidden["tools"],
            **hidden["variables"],
        )
        if continue_final_message:
            rendered = _end_inside(rendered, hidden["messages"][-1]["content"])
        ids = self._tokenizer.encode_chat(rendered, stand_ins)
        return ChatPrompt(rendered.translate(stand_ins), ids)


def _end_inside(rendered: str, content: str) -> str:
    """The text up to the end of its last message, which the template may have stripped."""
    start = rendered.rfind(content.strip())
    if not content.strip() or start < 0:
        raise RequestError(
            "the final message cannot be continued: it is empty, or the chat template changes it",
            hint="send its text as content, or leave continue_final_message out",
            param="continue_final_message",
        )
    whole = content.lstrip()
    end = start + (len(whole) if rendered.startswith(whole, start) else len(content.strip()))
    return rendered[:end]
