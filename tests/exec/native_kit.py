"""What the native executor's tests share: executors of any size, plans, and a look into every op of a step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from yeoul import _native
from yeoul.errors import YeoulError
from yeoul.exec.layout import View
from yeoul.exec.native import NativeExecutor
from yeoul.exec.protocol import ExecutorLimits
from yeoul.exec.reference import RULES, ReferenceExecutor
from yeoul.models.model import Model
from yeoul.models.registry import load_model
from yeoul.ops import vocabulary as v
from yeoul.ops.passes import inputs
from yeoul.step import PlanRow, SlotState, StepPlan
from yeoul.weights.catalogue import find_model
from yeoul.weights.gguf import GGUFFile

BLOCK = 16
GREEDY = SlotState(seed=3, sequence_index=0)
ISA_LEVELS = tuple(_native.isa_levels())


@contextmanager
def opened(path: Path, kv_dtype: str = "f16", v_dtype: str | None = None) -> Iterator[Model]:
    """`v_dtype`: how values are stored, if not as keys."""
    with GGUFFile.open(path) as file:
        yield load_model(file, k_dtype=kv_dtype, v_dtype=v_dtype or kv_dtype)


def pulled(name: str) -> Path:
    """The file of a catalogue model; skips where it is not on this machine."""
    try:
        return find_model(name)
    except YeoulError as error:
        pytest.skip(f"{error.message}; {error.hint}")


def limits_of(model: Model, *, tokens: int = 128, length: int = 512, seqs: int = 4) -> ExecutorLimits:
    """Room for `seqs` sequences of `length` tokens in every KV group."""
    blocks = seqs * (-(-length // BLOCK)) + 1
    return ExecutorLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=length,
        num_blocks=(blocks,) * len(model.program.kv_groups),
        block_size=BLOCK,
    )


def native(model: Model, isa: str = "auto", threads: int = 2, **sizes: int) -> NativeExecutor:
    return NativeExecutor(model, limits_of(model, **sizes), isa=isa, num_threads=threads)


class Stay:
    """One sequence in a slot: makes its rows one after the other, and hands out blocks in a random order."""

    def __init__(
        self, model: Model, limits: ExecutorLimits, slot: int, tokens: Sequence[int], state: SlotState = GREEDY
    ):
        self.slot, self.tokens, self.state, self.start = slot, list(tokens), state, 0
        each = (limits.num_blocks[0] - 1) // limits.max_num_seqs
        blocks = np.random.default_rng(slot).permutation(np.arange(1 + slot * each, 1 + (slot + 1) * each))
        self._free = [blocks.tolist() for _ in model.program.kv_groups]
        self._held = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.start

    def row(self, count: int, sample: bool = False) -> PlanRow:
        start, end = self.start, self.start + count
        wanted = -(-end // BLOCK) - self._held
        new = tuple(tuple(free.pop() for _ in range(wanted)) for free in self._free)
        self._held += wanted
        self.start = end
        return PlanRow(
            self.slot, start, count, tuple(self.tokens[start:end]), new, sample, self.state if start == 0 else None
        )


def prefill(executor: NativeExecutor | ReferenceExecutor, model: Model, tokens: Sequence[int], limits: ExecutorLimits):
    """Logits [len(tokens), vocab] of one sequence, computed in one step."""
    return executor.logits(StepPlan(0, (Stay(model, limits, 0, tokens).row(len(tokens)),)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@dataclass(frozen=True)
class Seen:
    """One op of a step as the native executor ran it. Values are copies, float32 [rows, dim]."""

    op: v.Op
    inputs: dict[int, np.ndarray]
    out: np.ndarray
    q8: bytes | None
    """The quantized form of `x`, rows side by side, where the op reads it."""


class Microscope:
    """Runs a step op by op and shows what each one read and wrote. `gathered`: the tokens whose logits are wanted."""

    def __init__(self, executor: NativeExecutor) -> None:
        self._executor = executor
        self._lowering = executor._lowering

    def run(self, plan: StepPlan, gathered: Sequence[int]) -> Iterator[Seen]:
        executor, layout = self._executor, self._lowering.layout
        tokens = executor._prepare(plan)
        executor._outputs.gathered[: len(gathered)] = gathered
        logits = np.empty((len(gathered), executor._vocab_size), np.float32)
        counts = {v.Rows.T: tokens, v.Rows.R: len(gathered)}
        for op, (first, last) in zip(self._lowering.program.ops, self._lowering.spans, strict=True):
            values = {value.id: self._floats(layout.views[value.id], counts[value.rows]) for value in inputs(op)}
            executor._program.run(tokens, len(plan.rows), len(gathered), len(gathered), logits, first, last)
            is_last = isinstance(op, v.Logits)
            out = logits if is_last else self._floats(layout.views[op.out.id], counts[op.out.rows])
            yield Seen(op, values, out, self._quantized(op, counts))

    def _floats(self, view: View, rows: int) -> np.ndarray:
        return self._executor._program.read(view, rows, 4 * view.dim).view(np.float32).reshape(rows, view.dim)

    def _quantized(self, op: v.Op, counts: dict[v.Rows, int]) -> bytes | None:
        if not isinstance(op, v.Linear | v.Logits) or op.x.id not in self._lowering.layout.q8:
            return None
        view, rows = self._lowering.layout.q8[op.x.id], counts[op.x.rows]
        return self._executor._program.read(view, rows, view.dim * 3 // 2).tobytes()


class Judge:
    """What the reference (`as_native`) makes of the inputs that the native executor had."""

    def __init__(self, model: Model, limits: ExecutorLimits) -> None:
        self._reference = ReferenceExecutor(model, limits, "as_native")

    def begin(self, plan: StepPlan, gathered: Sequence[int]) -> None:
        self._frame = self._reference._slots.prepare(plan)
        self._wanted = np.array(gathered)

    def expected(self, seen: Seen) -> np.ndarray:
        with np.errstate(all="ignore"):
            return RULES[type(seen.op)](self._reference, seen.op, dict(seen.inputs), self._frame, self._wanted)

    def forget_weights(self) -> None:
        """Large models: every matrix is widened to float32 only while it is used."""
        self._reference._values.clear()
