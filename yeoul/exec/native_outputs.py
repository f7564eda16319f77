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
NO_SAMPLING = (0.0, 1.0, 0.0, 0, 0, 0, 0)
"""SAMPLING of a score, but for the number of log-probabilities."""


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


def _sampling(row: PlanRow, state: SlotState) -> tuple[float, ...]:
    """One entry of SAMPLING."""
    return (
        state.temperature,
        state.top_p,
        state.min_p,
        max(state.top_k, 0),
        state.seed,
        state.sequence_index,
        row.start + row.num_tokens,
        state.num_logprobs,
    )


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

    def prepare(self, plan: StepPlan, begins: Sequence[int], states: Sequence[SlotState | None]) -> None:
        """Fill the arrays. `begins`: each row's first token in the step. Raises EngineError for what cannot be."""
        gathered: list[int] = []
        outputs: list[tuple[int, int, int, int]] = []
        sampling: list[tuple[float, ...]] = []
        num_masks = 0
        for row, begin in zip(plan.rows, begins, strict=True):
            state = states[row.slot]
            if state is None:
                raise EngineError(f"slot {row.slot} has no state")
            if row.score_targets:
                gathered += self._span(row, begin, row.score_first, len(row.score_targets))
                outputs += [(SCORE, row.slot, target, NO_MASK) for target in row.score_targets]
                sampling += [(*NO_SAMPLING, state.num_score_logprobs)] * len(row.score_targets)
            if row.sample:
                gathered.append(begin + row.num_tokens - 1)
                outputs.append((SAMPLE, row.slot, 0, num_masks if row.mask else NO_MASK))
                sampling.append(_sampling(row, state))
                if row.mask:
                    self._set_mask(num_masks, row.mask)
                    num_masks += 1
        num_logits = len(gathered)
        for row, begin in zip(plan.rows, begins, strict=True):
            if row.num_pooled:
                gathered += self._span(row, begin, row.num_tokens - row.num_pooled, row.num_pooled)
                outputs += [(POOL, row.slot, 0, NO_MASK)] * row.num_pooled
        self._fill(gathered, outputs, sampling)
        self.counts = (len(gathered), num_logits)

    def _fill(
        self, gathered: list[int], outputs: list[tuple[int, int, int, int]], sampling: list[tuple[float, ...]]
    ) -> None:
        if len(gathered) > len(self.gathered):
            raise EngineError(f"{len(gathered)} outputs are more than the executor was built for")
        if gathered:
            self.gathered[: len(gathered)] = gathered
            self._outputs[: len(outputs)] = outputs
        if sampling:
            self._sampling[: len(sampling)] = sampling

    def _span(self, row: PlanRow, begin: int, first: int, count: int) -> range:
        """`count` of a row's tokens from `first` on, as tokens of the step."""
        if not 0 <= first < first + count <= row.num_tokens:
            raise EngineError(f"slot {row.slot}: outputs are wanted of tokens that the row does not have")
        return range(begin + first, begin + first + count)

    def _set_mask(self, at: int, mask: bytes) -> None:
        if len(mask) != self._masks.shape[1] * 4:
            raise EngineError(f"a mask of {len(mask)} bytes does not fit the vocabulary")
        self._masks[at] = np.frombuffer(mask, "<u4")

    def collect(self, plan: StepPlan, states: Sequence[SlotState | None]) -> list[RowResult]:
        """The rows' results, in the plan's order, as far as they do not depend on broken keys."""
        count = self.counts[1]
        tokens, statuses = self._results["token"][:count].tolist(), self._results["status"][:count].tolist()
        results: list[RowResult] = []
        at = 0
        for row in plan.rows:
            end = at + len(row.score_targets) + row.sample
            bad = max(statuses[at:end], default=0)
            if bad or (row.num_pooled and not np.isfinite(self.pooled[row.slot]).all()):
                results.append(RowResult(status=RowStatus(bad) if bad else RowStatus.NAN))
            elif row.score_targets or row.num_pooled:
                results.append(self._row(row, at, end, tokens, states[row.slot]))
            elif row.sample:
                results.append(RowResult((tokens[at],), self._logprobs(at, states[row.slot])))
            else:
                results.append(RowResult())
            at = end
        return results

    def _row(self, row: PlanRow, at: int, end: int, tokens: list[int], state: SlotState | None) -> RowResult:
        last = end - row.sample
        num_scores = 0 if state is None else state.num_score_logprobs
        return RowResult(
            token_ids=(tokens[last],) if row.sample else (),
            logprobs=self._logprobs(last, state) if row.sample else (),
            scores=tuple([self._logprob(i, num_scores) for i in range(at, last)]),
            pooled=self.pooled[row.slot].astype("<f8").tobytes() if row.num_pooled else b"",
        )

    def _logprobs(self, at: int, state: SlotState | None) -> tuple[TokenLogprob, ...]:
        if state is None or state.num_logprobs < 0:
            return ()
        return (self._logprob(at, state.num_logprobs),)

    def _logprob(self, at: int, k: int) -> TokenLogprob:
        found = self._results[at]
        ids, values = found["top_ids"][:k].tolist(), found["top_logprobs"][:k].tolist()
        top = tuple((i, value) for i, value in zip(ids, values, strict=True) if i >= 0)
        return TokenLogprob(int(found["token"]), float(found["logprob"]), top)
