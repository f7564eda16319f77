"""NativeOutputs: what a native step is asked for (tokens to sample, targets to score, sums of hidden states).

Owns the arrays of it, which C++ reads and fills in place, and their translation from PlanRow and into RowResult. Must
not know models, blocks or how a step runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from yeoul import _native
from yeoul.errors import EngineError
from yeoul.step import LogitRules, PlanRow, RowResult, RowStatus, SlotState, StepPlan
from yeoul.types import MAX_LOGPROBS, TokenLogprob

SAMPLING = np.dtype(
    [
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("top_k", "i4"),
        ("seed", "u8"),
        ("sequence", "u4"),
        ("position", "u4"),
        ("num_logprobs", "i4"),
    ],
    align=True,
)
"""native/sampler.h SampleParams."""
RESULT = np.dtype(
    [
        ("token", "i4"),
        ("status", "i4"),
        ("logprob", "f4"),
        ("top_ids", "i4", MAX_LOGPROBS),
        ("top_logprobs", "f4", MAX_LOGPROBS),
    ],
    align=True,
)
"""native/sampler.h SampleResult."""
SAMPLE, SCORE, POOL = 0, 1, 2
"""native/program.h OutputKind."""
NO_MASK = -1


def logit_rules(rules: LogitRules, vocab_size: int) -> _native.LogitRules:
    """The native form of a sequence's rules. Raises EngineError for a token id outside the vocabulary."""
    prompt, output = rules.history[: rules.num_prompt_tokens], rules.history[rules.num_prompt_tokens :]
    try:
        return _native.LogitRules(
            vocab_size,
            rules.repetition_penalty,
            rules.frequency_penalty,
            rules.presence_penalty,
            list(rules.bias),
            list(rules.end_ids),
            rules.first_end,
            [list(word) for word in rules.bad_words],
            None if rules.allowed is None else list(rules.allowed),
            list(prompt),
            list(output),
        )
    except ValueError as error:
        raise EngineError(str(error)) from error


class NativeOutputs:
    """Outputs of one step at a time: `prepare` before it runs, `collect` after.

    `gathered`: int32 [R], tokens of the step in the order of the outputs: first all that need logits, then all that are
    pooled. `pooled`: float64 [slots, hidden].
    """

    def __init__(self, max_tokens: int, max_rows: int, *, vocab_size: int, hidden_size: int) -> None:
        size = max(max_tokens, max_rows)
        self.gathered = np.zeros(size, np.int32)
        self.pooled = np.zeros((max_rows, hidden_size))
        self.counts = (0, 0)
        """Gathered tokens, and how many of them need logits."""
        self._outputs = np.zeros((size, 4), np.int32)
        self._masks = np.zeros((max_rows, -(-vocab_size // 32)), np.uint32)
        self._sampling = np.zeros(size, SAMPLING)
        self._results = np.zeros(size, RESULT)
        if SAMPLING.itemsize != _native.SAMPLE_PARAMS_BYTES or RESULT.itemsize != _native.SAMPLE_RESULT_BYTES:
            raise EngineError("the native core was built from another version: build it again")

    def bind(
        self, program: _native.Program, tokens: np.ndarray, positions: np.ndarray, rows: np.ndarray, row_nan: np.ndarray
    ) -> None:
        """Give the program all arrays of a step: these and the caller's."""
        sampling, results = self._sampling.view(np.uint8), self._results.view(np.uint8)
        arrays = (self.gathered, self._outputs, self._masks, self.pooled, sampling, results)
        program.bind(tokens, positions, rows, *arrays, row_nan)

    def prepare(self, plan: StepPlan, rows: np.ndarray, states: Sequence[SlotState | None]) -> None:
        """Fill the arrays. `rows`: int32 [rows, 4], as the program has them. Raises EngineError for what cannot be."""
        count = num_masks = 0
        for index, row in enumerate(plan.rows):
            state, begin = states[row.slot], int(rows[index, 1])
            if state is None:
                raise EngineError(f"slot {row.slot} has no state")
            count = self._score(count, row, begin, state)
            if row.sample:
                mask = NO_MASK
                if row.mask:
                    mask, num_masks = num_masks, num_masks + 1
                    self._set_mask(mask, row.mask)
                self._sample(count, row, begin, state, mask)
                count += 1
        num_logits = count
        for index, row in enumerate(plan.rows):
            count = self._pool(count, row, int(rows[index, 1]))
        self.counts = (count, num_logits)

    def _sample(self, at: int, row: PlanRow, begin: int, state: SlotState, mask: int) -> None:
        self.gathered[at] = begin + row.num_tokens - 1
        self._outputs[at] = (SAMPLE, row.slot, 0, mask)
        self._sampling[at] = (
            state.temperature,
            state.top_p,
            state.min_p,
            max(state.top_k, 0),
            state.seed,
            state.sequence_index,
            row.start + row.num_tokens,
            state.num_logprobs,
        )

    def _score(self, at: int, row: PlanRow, begin: int, state: SlotState) -> int:
        """Returns the next free output, as does `_pool`."""
        end = at + len(row.score_targets)
        if end > at:
            self._check_span(row, row.score_first, row.score_first + end - at, end)
            first = begin + row.score_first
            self.gathered[at:end] = np.arange(first, first + end - at)
            self._outputs[at:end] = (SCORE, row.slot, 0, NO_MASK)
            self._outputs[at:end, 2] = row.score_targets
            self._sampling["num_logprobs"][at:end] = state.num_score_logprobs
        return end

    def _pool(self, at: int, row: PlanRow, begin: int) -> int:
        end = at + row.num_pooled
        if end > at:
            last = begin + row.num_tokens
            self._check_span(row, row.num_tokens - row.num_pooled, row.num_tokens, end)
            self.gathered[at:end] = np.arange(last - row.num_pooled, last)
            self._outputs[at:end] = (POOL, row.slot, 0, NO_MASK)
        return end

    def _check_span(self, row: PlanRow, first: int, end: int, outputs: int) -> None:
        if not 0 <= first < end <= row.num_tokens or outputs > len(self.gathered):
            raise EngineError(f"slot {row.slot}: outputs are wanted of tokens that the row does not have")

    def _set_mask(self, at: int, mask: bytes) -> None:
        if len(mask) != self._masks.shape[1] * 4:
            raise EngineError(f"a mask of {len(mask)} bytes does not fit the vocabulary")
        self._masks[at] = np.frombuffer(mask, "<u4")

    def collect(self, plan: StepPlan, states: Sequence[SlotState | None]) -> list[RowResult]:
        """The rows' results, in the plan's order, as far as they do not depend on broken keys."""
        tokens, statuses = self._results["token"].tolist(), self._results["status"].tolist()
        results: list[RowResult] = []
        at = 0
        for row in plan.rows:
            end = at + len(row.score_targets) + row.sample
            bad = next((status for status in statuses[at:end] if status), 0)
            if bad:
                results.append(RowResult(status=RowStatus(bad)))
            elif row.num_pooled and not np.isfinite(self.pooled[row.slot]).all():
                results.append(RowResult(status=RowStatus.NAN))
            elif end == at and not row.num_pooled:
                results.append(RowResult())
            else:
                results.append(self._row(row, at, end, tokens, states[row.slot]))
            at = end
        return results

    def _row(self, row: PlanRow, at: int, end: int, tokens: list[int], state: SlotState | None) -> RowResult:
        last = end - row.sample
        num_logprobs = -1 if state is None else state.num_logprobs
        num_scores = 0 if state is None else state.num_score_logprobs
        return RowResult(
            token_ids=(tokens[last],) if row.sample else (),
            logprobs=(self._logprob(last, num_logprobs),) if row.sample and num_logprobs >= 0 else (),
            scores=tuple([self._logprob(i, num_scores) for i in range(at, last)]),
            pooled=self.pooled[row.slot].astype("<f8").tobytes() if row.num_pooled else b"",
        )

    def _logprob(self, at: int, k: int) -> TokenLogprob:
        found = self._results[at]
        ids, values = found["top_ids"][:k].tolist(), found["top_logprobs"][:k].tolist()
        top = tuple((i, value) for i, value in zip(ids, values, strict=True) if i >= 0)
        return TokenLogprob(int(found["token"]), float(found["logprob"]), top)
