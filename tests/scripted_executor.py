"""A deterministic executor for tests of everything above it: tokens are hashes of what the block tables lead to.

It keeps a KV "cache" of (position, token) pairs, written at (block, offset) as the plan says and read back through the
block tables of every KV group, so a wrong table, position, freed block or recomputation changes the tokens or raises.
Steps check what they can: slots taken twice, gaps in positions, null or shared blocks, tables too short.
"""

from collections.abc import Callable, Sequence
from zlib import crc32

from yeoul.config import BLOCK_SIZE
from yeoul.engine.client import EngineInfo
from yeoul.engine.clock import WallClock
from yeoul.engine.loop import Engine, EngineParts
from yeoul.engine.step_log import HeaderRecord, StepLog
from yeoul.exec.protocol import Ticket
from yeoul.kv.manager import KVManager
from yeoul.kv.swap import SwapSpace
from yeoul.sched.policies import Policies
from yeoul.sched.scheduler import Scheduler
from yeoul.step import NULL_BLOCK, PlanRow, RowResult, RowStatus, SlotState, StepPlan, StepResult
from yeoul.types import KVKind, KVSpec, Request, SamplingParams, TokenLogprob

VOCAB = 251
EOS = 0
FULL = KVSpec(KVKind.FULL, 1, 8, 8)


def window_spec(window: int) -> KVSpec:
    return KVSpec(KVKind.WINDOW, 1, 8, 8, window=window)


class Slot:
    def __init__(self, state: SlotState, num_groups: int, computed: int) -> None:
        self.state = state
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.computed = computed
        self.last_token: int | None = None


class ScriptedExecutor:
    """`before(plan)` may raise, to inject faults; `row_status(plan, row)` may spoil single rows."""

    max_in_flight = 1

    def __init__(
        self, specs: Sequence[KVSpec], num_blocks: Sequence[int], max_num_seqs: int, seconds: float = 0.0
    ) -> None:
        self.specs = specs
        self.max_num_seqs = max_num_seqs
        self.cells: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in specs]
        self.num_blocks = num_blocks
        self.slots: dict[int, Slot] = {}
        self.swapped: dict[int, list[list[list[tuple[int, int] | None]]]] = {}
        self.before: Callable[[StepPlan], None] = lambda plan: None
        self.row_status: Callable[[StepPlan, PlanRow], RowStatus] = lambda plan, row: RowStatus.OK
        self.plans: list[StepPlan] = []
        self.closed = False
        self.in_doubt = False
        self._results: dict[Ticket, StepResult] = {}
        self._clock = WallClock()

    def submit(self, plan: StepPlan) -> Ticket:
        self.plans.append(plan)
        started = self._clock.now()
        self._prepare(plan)
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot twice in one step"
        rows = tuple([self._row(plan, row) for row in plan.rows])
        ticket = Ticket(plan.step_id)
        self._results[ticket] = StepResult(plan.step_id, rows, started, self._clock.now())
        return ticket

    def _prepare(self, plan: StepPlan) -> None:
        """After a failed step (tests with faults elsewhere set `in_doubt`) nobody knows which slots are taken."""
        try:
            self.before(plan)
        except BaseException:
            self.in_doubt = True
            raise
        for slot in plan.released_slots:
            del self.slots[slot]
        self._move(plan)

    def _move(self, plan: StepPlan) -> None:
        for handle in plan.dropped_swaps:
            self.swapped.pop(handle, None)
        for out in plan.swap_outs:
            self.swapped[out.handle] = [
                [self._take_cells(group, block) for block in blocks] for group, blocks in enumerate(out.blocks)
            ]
        for copy in plan.block_copies:
            self._put_cells(copy.group, copy.target, self._take_cells(copy.group, copy.source))
        for back in plan.swap_ins:
            for group, (blocks, kept) in enumerate(zip(back.blocks, self.swapped.pop(back.handle), strict=True)):
                for block, cells in zip(blocks, kept, strict=True):
                    self._put_cells(group, block, cells)

    def _take_cells(self, group: int, block: int) -> list[tuple[int, int] | None]:
        return [self.cells[group].get((block, offset)) for offset in range(BLOCK_SIZE)]

    def _put_cells(self, group: int, block: int, cells: Sequence[tuple[int, int] | None]) -> None:
        for offset, cell in enumerate(cells):
            self.cells[group].pop((block, offset), None)
            if cell is not None:
                self.cells[group][block, offset] = cell

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket)

    def describe(self) -> str:
        return "scripted"

    def close(self) -> None:
        self.closed = True

    def _row(self, plan: StepPlan, row: PlanRow) -> RowResult:
        assert 0 <= row.slot < self.max_num_seqs
        if row.state is not None:
            assert self.in_doubt or row.slot not in self.slots, "a slot that was never released"
            self.slots[row.slot] = Slot(row.state, len(self.specs), row.start)
        slot = self.slots[row.slot]
        assert row.start == slot.computed, f"positions from {row.start}, computed {slot.computed}"
        token_ids = row.token_ids
        if not token_ids:
            assert row.num_tokens == 1 and slot.last_token is not None
            token_ids = (slot.last_token,)
        assert len(token_ids) == row.num_tokens > 0
        self._write(slot, row, token_ids)
        self._read(slot, row.start)
        slot.computed = row.start + row.num_tokens
        status = self.row_status(plan, row)
        if status is not RowStatus.OK:
            return RowResult(status=status)
        return self._sample(slot) if row.sample else RowResult()

    def _write(self, slot: Slot, row: PlanRow, token_ids: Sequence[int]) -> None:
        for group, blocks in enumerate(row.new_blocks):
            for index, block in enumerate(blocks, len(slot.tables[group])):
                assert 0 <= block < self.num_blocks[group]
                if index * BLOCK_SIZE < row.start:
                    continue  # Shared, copied or brought back: its contents are what the stay begins with.
                assert block != NULL_BLOCK
                # Poison: whatever an earlier owner left is gone, and reading it before writing raises KeyError.
                for offset in range(BLOCK_SIZE):
                    self.cells[group].pop((block, offset), None)
            slot.tables[group].extend(blocks)
            for position, token in enumerate(token_ids, row.start):
                self.cells[group][self._cell(slot, group, position)] = (position, token)

    def _cell(self, slot: Slot, group: int, position: int) -> tuple[int, int]:
        block = slot.tables[group][position // BLOCK_SIZE]
        assert block != NULL_BLOCK
        return block, position % BLOCK_SIZE

    def _read(self, slot: Slot, last: int) -> list[tuple[int, int]]:
        """Everything that the token at position `last` sees, in every group."""
        seen: list[tuple[int, int]] = []
        for group, spec in enumerate(self.specs):
            first = max(0, last - spec.window + 1) if spec.window else 0
            for position in range(first, last + 1):
                cell = self.cells[group][self._cell(slot, group, position)]
                assert cell[0] == position, f"position {position} reads what was written for {cell[0]}"
                seen.append(cell)
        return seen

    def _sample(self, slot: Slot) -> RowResult:
        """A hash of what the last position sees and of the sampling state."""
        seen = self._read(slot, slot.computed - 1)
        state = slot.state
        key = (seen, slot.computed, state.seed if state.temperature else 0, state.sequence_index, state.temperature)
        token = crc32(repr(key).encode()) % VOCAB
        slot.last_token = token
        logprobs = (TokenLogprob(token, -1.0 - token / VOCAB),) if state.num_logprobs >= 0 else ()
        return RowResult((token,), logprobs)


class ScriptedText:
    """Each token is the text `<id>`; stop strings are matched on the whole text; one piece is always held back."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        if "explode on open" in stop:
            raise RuntimeError("scripted fault")
        self._stop = stop
        self._text = ""
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        if "explode on push" in self._stop and self._text.count("<") >= 3:
            raise RuntimeError("scripted fault")
        before = len(self._text) - len(self._held)
        self._text += "".join(f"<{token}>" for token in token_ids)
        for stop in self._stop:
            if stop in self._text:
                self.stopped = True
                return self._text[before : self._text.index(stop)]
        self._held = self._text[-1:]
        return self._text[before : len(self._text) - len(self._held)]

    def finish(self) -> str:
        held, self._held = ("" if self.stopped else self._held), ""
        return held


class ScriptedTokenizer:
    """Ids are code points."""

    vocab_size = VOCAB

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def encode_chat(self, rendered: str) -> list[int]:
        return self.encode(rendered)


def scripted_engine(
    *,
    specs: Sequence[KVSpec] = (FULL,),
    num_blocks: Sequence[int] = (257,),
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 512,
    max_waiting_tokens: int = 1 << 20,
    step_log: str | None = None,
    executor: ScriptedExecutor | None = None,
    seed: int = 1,
    prefix_caching: bool = True,
    allocation: str = "paged",
    policies: Policies | None = None,
    swap_blocks: int = 0,
    **log_options: object,
) -> Engine:
    kv = KVManager(
        specs,
        num_blocks,
        BLOCK_SIZE,
        prefix_caching=prefix_caching,
        allocation=allocation,
        max_model_len=max_model_len,
    )
    executor = executor or ScriptedExecutor(specs, num_blocks, max_num_seqs)
    scheduler = Scheduler(
        kv,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        end_tokens=frozenset({EOS}),
        policies=policies,
        swap_space=SwapSpace(swap_blocks, [1] * len(specs)) if swap_blocks else None,
    )
    header = HeaderRecord(
        unix=0.0, at=0.0, config={"seed": seed}, machine={}, model="scripted", executor="scripted", seed=seed
    )
    return Engine(
        EngineParts(
            info=EngineInfo(
                model_name="scripted",
                architecture="scripted",
                vocab_size=VOCAB,
                max_model_len=scheduler.max_model_len,
                max_num_seqs=max_num_seqs,
                block_size=BLOCK_SIZE,
                num_kv_tokens=(num_blocks[0] - 1) * BLOCK_SIZE,
                executor="scripted",
            ),
            scheduler=scheduler,
            kv=kv,
            executor=executor,
            make_text=lambda params: ScriptedText(params.stop),
            clock=WallClock(),
            step_log=StepLog(header, step_log, **log_options),  # type: ignore[arg-type]
            seed=seed,
            max_waiting_tokens=max_waiting_tokens,
            tokenizer=ScriptedTokenizer(),
        )
    )


def request(request_id: str, prompt: Sequence[int], **params: object) -> Request:
    params.setdefault("temperature", 0.0)
    params.setdefault("ignore_eos", True)
    return Request(request_id=request_id, prompt_token_ids=list(prompt), params=SamplingParams(**params))  # type: ignore[arg-type]


def executor_of(engine: Engine) -> ScriptedExecutor:
    executor = engine._executor
    assert isinstance(executor, ScriptedExecutor)
    return executor
