"""SequenceOutput: from committed tokens to the TokenOutputs of one sequence.

Owns the text state and what a delivery contains. Must not know the executor, blocks or clients.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Protocol

from yeoul.engine.timeline import Timeline
from yeoul.sched.results import Committed
from yeoul.sched.sequence import Sequence
from yeoul.types import FinishReason, Structured, TokenOutput


class TextState(Protocol):
    """What is needed of yeoul.text.detokenizer.OutputText: incremental text with stop strings."""

    @property
    def stopped(self) -> bool:
        """A stop string was found; the text returned so far ends before it."""
        ...

    def push(self, token_ids: Tokens[int]) -> str:
        """Text that is certain after these tokens; the rest is held back."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class GrammarState(Protocol):
    """What is needed of yeoul.text.grammar.Grammar: where a sequence stands in the form that its output must have."""

    @property
    def is_finished(self) -> bool:
        """Nothing may follow."""
        ...

    def mask(self) -> bytes:
        """The ids that may come next, as PlanRow.mask has them."""
        ...

    def advance(self, token_ids: Tokens[int]) -> None:
        """Take in what was sampled."""
        ...


class Grammars(Protocol):
    """Makes the grammar of a sequence."""

    def start(self, structured: Structured) -> GrammarState:
        """A grammar at its beginning. Raises RequestError for what cannot be compiled."""
        ...


class SequenceOutput:
    """One sequence's deliveries. After an output with a finish_reason nothing more may be asked of it."""

    __slots__ = ("_text", "grammar", "sequence", "timeline")

    def __init__(self, sequence: Sequence, text: TextState, grammar: GrammarState | None = None) -> None:
        self.sequence = sequence
        self.timeline = Timeline(sequence.arrived_at)
        self.grammar = grammar
        self._text = text

    def advance(self, gained: Committed) -> TokenOutput:
        """The delivery for what a step gained. A stop string ends the sequence here, whatever the scheduler thinks."""
        hidden = gained.ended_by_token and not self.sequence.request.params.include_stop_str_in_output
        shown = gained.token_ids[:-1] if hidden else gained.token_ids
        text = self._text.push(shown)
        reason = gained.finish_reason or self._follow(gained)
        if reason is not None:
            text += self._text.finish()
        if self._text.stopped and reason is not FinishReason.ERROR:
            reason = FinishReason.STOP
        return TokenOutput(
            request_id=self.sequence.request.request_id,
            index=self.sequence.index,
            text=text,
            token_ids=gained.token_ids,
            logprobs=gained.logprobs,
            prompt_logprobs=gained.prompt_logprobs,
            pooled=gained.pooled,
            finish_reason=reason,
            error=gained.error,
            num_prompt_tokens=self.sequence.num_prompt_tokens,
            num_output_tokens=self.sequence.num_output_tokens,
            num_cached_tokens=self.sequence.num_cached_tokens,
            times=None if reason is None else self.timeline.times(self.sequence.num_output_tokens),
        )

    def _follow(self, gained: Committed) -> FinishReason | None:
        """Go on in the grammar; STOP where it is complete."""
        if self.grammar is None or not gained.token_ids:
            return None
        self.grammar.advance(gained.token_ids)
        return FinishReason.STOP if self.grammar.is_finished else None

    def abort(self) -> TokenOutput:
        """The last delivery of an aborted sequence: the text that was held back."""
        return ended(self.sequence, FinishReason.ABORT, text=self._text.finish())


def ended(sequence: Sequence, reason: FinishReason, *, text: str = "", error: str | None = None) -> TokenOutput:
    """A last delivery without tokens."""
    return TokenOutput(
        request_id=sequence.request.request_id,
        index=sequence.index,
        text=text,
        finish_reason=reason,
        error=error,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
    )
