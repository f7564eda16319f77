"""ThinkReader: the reasoning that a model writes in `<think>...</think>` before its answer. Must not know tools."""

from __future__ import annotations

from yeoul.server.replies.part import split_at

OPEN = "<think>"
CLOSE = "</think>"


def ends_in_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt has opened the reasoning already, so that the reply begins inside it."""
    return prompt.rstrip().endswith(OPEN)


class ThinkReader:
    """Splits a reply into (reasoning, content). White space around the tags is dropped.

    `opened`: the prompt ends with the opening tag. Otherwise a reply that does not begin with it is all content.
    """

    def __init__(self, *, opened: bool) -> None:
        self._is_start = not opened
        self._is_thinking = opened
        self._skips_space = opened
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """The next piece of text; what is certain now."""
        text = self._held + text
        self._held = ""
        if self._is_start and not self._begin(text):
            return "", ""
        if self._is_thinking:
            return self._think(text)
        return "", self._spaced(text)

    def finish(self) -> tuple[str, str]:
        """The text is over: what was held back."""
        held, self._held = self._held, ""
        return (held, "") if self._is_thinking else ("", held)

    def _begin(self, text: str) -> bool:
        """False while the reply may still turn out to begin with the tag."""
        if _may_be_open(text):
            self._held = text
            return False
        self._is_start = False
        self._is_thinking = self._skips_space = text.lstrip().startswith(OPEN)
        return True

    def _think(self, text: str) -> tuple[str, str]:
        if self._skips_space:  # the tag, or one that repeats the prompt's
            if _may_be_open(text):
                self._held = text
                return "", ""
            text = text.lstrip().removeprefix(OPEN)
        reasoning, found, rest = split_at(self._spaced(text), CLOSE)
        if not found:
            told = reasoning.rstrip()
            self._held = reasoning[len(told) :] + rest
            return told, ""
        self._is_thinking, self._skips_space = False, True
        return reasoning.rstrip(), self._spaced(rest)

    def _spaced(self, text: str) -> str:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text


def _may_be_open(text: str) -> bool:
    start = text.lstrip()
    return OPEN.startswith(start) and start != OPEN
