"""Part: what a piece of a reply turned out to be. Owns the words that readers and answers share, and how a tag that may
have begun is held back. Must not know any format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a tool call: its name, with the first delta, and the next piece of its arguments' JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Part:
    """What became certain; in a reply, reasoning comes before content."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolReader(Protocol):
    """Reads a reply that may hold tool calls. What it does not understand is content."""

    def push(self, text: str) -> Part:
        """The next piece of text; what is certain now."""
        ...

    def finish(self) -> Part:
        """The text is over: what was held back."""
        ...


def split_at(text: str, tag: str) -> tuple[str, str, str]:
    """(before, tag or "", after): as str.partition, but where the tag is not there `after` is the end of the text that
    may begin it."""
    before, found, after = text.partition(tag)
    if found:
        return before, found, after
    longest = min(len(text), len(tag) - 1)
    size = next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
    return text[: len(text) - size], "", text[len(text) - size :]
