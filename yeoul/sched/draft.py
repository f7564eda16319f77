"""PlanDraft: a StepPlan while it is made. Owns what has been decided so far; decides nothing itself."""

from __future__ import annotations

from yeoul.kv.manager import NewBlocks
from yeoul.sched.sequence import Sequence
from yeoul.sched.swapping import Swapping
from yeoul.step import BlockCopy, PlanRow, StepPlan


class PlanDraft:
    """Rows in the order in which they were granted, and the token budget that is left."""

    def __init__(self, budget: int, end_tokens: frozenset[int]) -> None:
        self.budget = budget
        self._end_tokens = end_tokens
        self.rows: list[PlanRow] = []
        self.scheduled: list[Sequence] = []
        """In the order of `rows`."""
        self.started: list[Sequence] = []
        """Those of them whose stay begins with this plan."""
        self.copies: list[BlockCopy] = []

    def add(self, sequence: Sequence, count: int, blocks: NewBlocks) -> None:
        """Plan the next `count` tokens of a sequence that has a slot; the caller has taken them from the budget."""
        start = sequence.num_computed_tokens
        end = start + count
        state = None if sequence.in_slot else sequence.slot_state(self._end_tokens)
        token_ids = () if sequence.sampled_in_slot else tuple(sequence.token_ids[start:end])
        sequence.in_slot = True
        sequence.num_scheduled_tokens = count
        sample = end == len(sequence.token_ids) and not sequence.only_prompt
        first, targets = sequence.score_span(start, end)
        row = PlanRow(
            sequence.slot,
            start,
            count,
            token_ids,
            blocks,
            sample,
            state,
            score_first=first,
            score_targets=targets,
            num_pooled=sequence.num_pooled(start, end),
        )
        self.rows.append(row)
        self.scheduled.append(sequence)

    def plan(self, step_id: int, released_slots: list[int], swapping: Swapping) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step_id,
            tuple(self.rows),
            tuple(released_slots),
            tuple(self.copies),
            tuple(swapping.dropped),
            tuple(swapping.outs),
            tuple(swapping.ins),
        )
