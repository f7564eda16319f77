"""ReferenceExecutor: runs plans by interpreting the program op by op in numpy. The oracle for every other executor.

Owns the interpretation of ops, its KV arrays and the two modes of rounding. Must not know the scheduler, requests or
text; makes no promise of speed, nor (as BLAS is used) of equal bits in different batches.

Modes:
- `exact`: float64 everywhere, weights as the file holds them, keys and values unrounded; the program as written.
- `as_native`: float64 sums, with the roundings of the native executor: the fused program; every op's result, logits
  included, float32; inputs of quantized matrices int8 per 32 values; keys and values in the KV dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from yeoul.errors import EngineError
from yeoul.exec import reference_math as m
from yeoul.exec.kv_wire import fingerprint
from yeoul.exec.protocol import ExecutorLimits, Ticket
from yeoul.exec.reference_kv import ROUNDINGS, store
from yeoul.exec.reference_sampling import sample, score
from yeoul.exec.reference_slots import Frame, RowFrame, Slots, first_key, wanted_tokens
from yeoul.exec.swap import Swapper, SwapStore
from yeoul.models.model import Model
from yeoul.ops import vocabulary as v
from yeoul.ops.passes import fuse, inputs
from yeoul.step import PlanRow, RowResult, RowStatus, StepPlan, StepResult
from yeoul.weights.dequant import dequantize
from yeoul.weights.tensor import Tensor

Array = np.ndarray
Mode = Literal["exact", "as_native"]
KV_TYPES: Mapping[str, np.dtype[Any]] = MappingProxyType({"f16": np.dtype(np.float16)})
"""How numbers that are already rounded to a KV dtype are kept; not named here: as float32, which holds all of them."""
TILE_ROWS = 8192
"""Rows of a matrix that are widened to float64 at once."""
LOGIT_ROWS = 16
"""Rows of logits that exist at one time."""


class ReferenceExecutor:
    """See the module. Raises EngineError for a KV dtype that it does not know."""

    max_in_flight = 1

    def __init__(
        self,
        model: Model,
        limits: ExecutorLimits,
        mode: Mode = "exact",
        clock: Callable[[], float] = time.perf_counter,
        swap_dir: str | None = None,
    ) -> None:
        self._mode = mode
        self._clock = clock
        self._weights = model.weights
        self._program = model.program if mode == "exact" else fuse(model.program)
        self._dead = _last_uses(self._program)
        self._group_of = {layer: g for g, (_, layers) in enumerate(model.program.kv_groups) for layer in layers}
        self._slots = Slots([spec for spec, _ in model.program.kv_groups], limits, model.spec.vocab_size)
        self._kv = [self._empty_kv(op, limits) for op in self._program.ops if isinstance(op, v.Attention)]
        numerics = fingerprint("reference", mode, model.spec, model.program.kv_groups, model.program.kv_scales)
        self._swapper = Swapper(self, numerics, SwapStore(swap_dir))
        self._failed_slots: frozenset[int] = frozenset()
        self._values: dict[str, Array] = {}
        self._results: dict[Ticket, StepResult | EngineError] = {}
        self._tickets = 0

    def submit(self, plan: StepPlan) -> Ticket:
        """Run the plan; its result, or its error, waits for `collect`."""
        ticket = Ticket(self._tickets)
        self._tickets += 1
        try:
            self._results[ticket] = self._run(plan)
        except EngineError as error:
            self._results[ticket] = error
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        """See Executor. Raises EngineError also for a ticket that was never given or already collected."""
        result = self._results.pop(ticket, EngineError(f"ticket {ticket} is unknown"))
        if isinstance(result, EngineError):
            raise result
        return result

    def logits(self, plan: StepPlan) -> Array:
        """See Executor: float32 [num_tokens, vocab]. Raises EngineError for a plan that is not sound."""
        frame = self._prepare(plan)
        rows = [*self._logit_rows(self._execute(frame, np.arange(len(frame.tokens))))]
        return np.stack(rows) if rows else np.empty((0, self._program.head.out.dim), np.float32)

    def describe(self) -> str:
        """See Executor."""
        what = "float64" if self._mode == "exact" else "rounding as native does"
        return f"reference: numpy, {what}; an oracle, not fast"

    def close(self) -> None:
        """Drop weights and KV."""
        self._values.clear()
        self._kv.clear()
        self._swapper.close()
        self._results.clear()

    def _run(self, plan: StepPlan) -> StepResult:
        started = self._clock()
        frame = self._prepare(plan)
        wanted = [wanted_tokens(row, made.begin) for row, made in zip(plan.rows, frame.rows, strict=True)]
        hidden = self._execute(frame, np.array([token for tokens in wanted for token in tokens], np.int64))
        results, at = [], 0
        for row, made, tokens in zip(plan.rows, frame.rows, wanted, strict=True):
            results.append(self._row_result(row, made, hidden[at : at + len(tokens)]))
            at += len(tokens)
        return StepResult(plan.step_id, tuple(results), started, self._clock())

    def _prepare(self, plan: StepPlan) -> Frame:
        """Check the plan and move blocks as it says."""
        frame = self._slots.prepare(plan)
        self._swapper.out(plan.dropped_swaps, plan.swap_outs)
        for copy in plan.block_copies:
            for keys, values in self._layers(copy.group):
                keys[copy.target], values[copy.target] = keys[copy.source], values[copy.source]
        self._failed_slots = self._swapper.back(plan.swap_ins)
        return frame

    def _layers(self, group: int) -> list[tuple[Array, Array]]:
        return [kv for layer, kv in enumerate(self._kv) if self._group_of[layer] == group]

    def read_blocks(self, group: int, blocks: Sequence[int]) -> tuple[Array, Array]:
        """See yeoul.exec.swap.BlockAccess."""
        ids = list(blocks)
        keys, values = zip(*self._layers(group), strict=True)
        return _to_wire([layer[ids] for layer in keys]), _to_wire([layer[ids] for layer in values])

    def write_blocks(self, group: int, blocks: Sequence[int], keys: Array, values: Array) -> None:
        """See yeoul.exec.swap.BlockAccess."""
        for layer, (own_keys, own_values) in enumerate(self._layers(group)):
            _from_wire(own_keys, blocks, keys[:, layer])
            _from_wire(own_values, blocks, values[:, layer])

    def _row_result(self, row: PlanRow, made: RowFrame, hidden: Array) -> RowResult:
        """`hidden`: of the row's wanted tokens, [.., dim]: those to score, the one to sample, those to pool."""
        if row.slot in self._failed_slots:
            return RowResult(status=RowStatus.ERROR)
        num_scores = len(row.score_targets)
        targets = zip(row.score_targets, self._logit_rows(hidden[:num_scores]), strict=True)
        scores = [score(logits, target, made.slot.state.num_score_logprobs) for target, logits in targets]
        result = RowResult()
        if row.sample:
            (logits,) = self._logit_rows(hidden[num_scores : num_scores + 1])
            result = sample(logits, made.slot.state, made.end, made.slot.history, row.mask)
            made.slot.take(result.token_ids)
        found = [entry for entry in scores if entry is not None]
        if result.status is not RowStatus.OK or len(found) < num_scores:
            return result if result.status is not RowStatus.OK else RowResult(status=RowStatus.NAN)
        pooled = made.slot.pool(hidden[num_scores + row.sample :]) if row.num_pooled else b""
        return RowResult(result.token_ids, result.logprobs, RowStatus.OK, tuple(found), pooled)

    def _logit_rows(self, hidden: Array) -> Iterator[Array]:
        """float32 [vocab] of each row of [.., dim], never more than LOGIT_ROWS at a time."""
        op = self._program.head
        for first in range(0, len(hidden), LOGIT_ROWS):
            with np.errstate(all="ignore"):
                yield from self._matmul(hidden[first : first + LOGIT_ROWS], op.weight).astype(np.float32)

    def _execute(self, frame: Frame, wanted: Array) -> Array:
        """The inputs of the logits, float64 [len(wanted), dim], of these of the step's tokens."""
        env: dict[int, Array] = {}
        # Broken numbers are reported by the status of the row that has them.
        with np.errstate(all="ignore"):
            for op, dead in zip(self._program.ops[:-1], self._dead, strict=False):
                result = RULES[type(op)](self, op, env, frame, wanted)
                env[op.out.id] = result if self._mode == "exact" else result.astype(np.float32)
                for value in dead:
                    del env[value]
            return _wide(env, self._program.head.x)

    def _embed(self, op: v.Embed, env: dict[int, Array], frame: Frame, wanted: Array) -> Array:
        tensor = self._weights[op.weight]
        rows = tensor.data.reshape(tensor.shape[0], -1)[frame.tokens]
        part = Tensor(tensor.name, tensor.type, (len(rows), tensor.shape[1]), rows.reshape(-1))
        return dequantize(part).astype(np.float64)

    def _rms_norm(self, op: v.RMSNorm, env: dict[int, Array], frame: Frame, wanted: Array) -> Array:
        return m.rms_norm(_wide(env, op.x), self._weight(op.weight).astype(np.float64), op.eps, op.heads)

    def _linear(self, op: v.Linear, env: dict[int, Array], frame: Frame, wanted: Array) -> Array:
        x = _wide(env, op.x)
        out = np.concatenate([self._segment(x, segment) for segment in op.segments], axis=1)
        if op.glu is not None:
            out = m.gated(out, op.glu)
        if op.residual is not None:
            out = out + _wide(env, op.residual)
        return out

    def _segment(self, x: Array, segment: v.Segment) -> Array:
        out = self._matmul(x, segment.weight)
        if segment.bias is not None:
            out += self._weight(segment.bias).astype(np.float64)
        return out

    def _slice(self, op: v.Slice, env: dict[int, Array], frame: Frame, wanted: Array) -> Array:
        return env[op.x.id][:, op.start : op.start + op.out.dim]

    def _rope(self, op: v.Rope, env: dict[int, Array], frame: Frame, wanted: Array) -> Array:
        return m.rope(_wide(env, op.x), frame.positions, op.rope)

    def _attention(self, op: v.Attention, env: dict[int, Array], frame: Frame, wanted: Array) -> Array:
        out = np.empty((len(frame.tokens), op.out.dim))
        for row in frame.rows:
            self._attend_row(op, env, row, out)
        return out

    def _attend_row(self, op: v.Attention, env: dict[int, Array], row: RowFrame, out: Array) -> None:
        """Write the row's keys and values to the cache, then read all that it sees back from there."""
        group, (keys, values) = self._group_of[op.layer], self._kv[op.layer]
        mine = slice(row.begin, row.begin + row.count)
        blocks, offsets = self._slots.places("attention", row, group, row.start, row.end)
        keys[blocks, offsets] = self._stored(
            env[op.k.id][mine].reshape(row.count, *keys.shape[2:]), op.kv.k_dtype, op.k_scale
        )
        values[blocks, offsets] = self._stored(
            env[op.v.id][mine].reshape(row.count, *values.shape[2:]), op.kv.v_dtype, op.v_scale
        )
        base = first_key(row.start, op.kv.window)
        blocks, offsets = self._slots.places("attention", row, group, base, row.end)
        seen_keys = keys[blocks, offsets].astype(np.float64)
        seen_values = values[blocks, offsets].astype(np.float64)
        queries = _wide(env, op.q)[mine].reshape(row.count, -1, op.kv.key_size)
        for index, query in enumerate(queries):
            position = row.start + index
            seen = slice(first_key(position, op.kv.window) - base, position + 1 - base)
            out[row.begin + index] = m.attend(query, seen_keys[seen], seen_values[seen], op.scale).reshape(-1)

    def _stored(self, values: Array, dtype: str, scale: float) -> Array:
        return values if self._mode == "exact" else store(dtype, values, scale)

    def _gated(self, op: v.GatedActivation, env: dict[int, Array], frame: Frame, wanted: Array) -> Array:
        return m.gated(_wide(env, op.x), op.activation)

    def _add(self, op: v.Add, env: dict[int, Array], frame: Frame, wanted: Array) -> Array:
        return _wide(env, op.a) + _wide(env, op.b)

    def _scale(self, op: v.Scale, env: dict[int, Array], frame: Frame, wanted: Array) -> Array:
        return _wide(env, op.x) * op.factor

    def _gather_rows(self, op: v.GatherRows, env: dict[int, Array], frame: Frame, wanted: Array) -> Array:
        return np.take(env[op.x.id], wanted, axis=0)

    def _logits(self, op: v.Logits, env: dict[int, Array], frame: Frame, wanted: Array) -> Array:
        return self._matmul(_wide(env, op.x), op.weight)

    def _matmul(self, x: Array, name: str) -> Array:
        """x @ W.T in float64, a tile of W at a time."""
        if self._mode == "as_native" and self._weights[name].type.name.startswith("Q"):
            x = m.quantize_activations(x)
        weight = self._weight(name)
        out = np.empty((len(x), len(weight)))
        for first in range(0, len(weight), TILE_ROWS):
            tile = slice(first, first + TILE_ROWS)
            out[:, tile] = x @ weight[tile].astype(np.float64).T
        return out

    def _weight(self, name: str) -> Array:
        """A tensor's values, float32 (which holds every encoding exactly), kept once computed."""
        if name not in self._values:
            self._values[name] = dequantize(self._weights[name])
        return self._values[name]

    def _empty_kv(self, op: v.Attention, limits: ExecutorLimits) -> tuple[Array, Array]:
        """One layer's keys and values: [blocks, block_size, kv_heads, size]. Pages are touched when written."""
        kv = op.kv
        shape = (limits.num_blocks[self._group_of[op.layer]], limits.block_size, kv.num_kv_heads)
        keys, values = self._kv_type(kv.k_dtype), self._kv_type(kv.v_dtype)
        return np.zeros((*shape, kv.key_size), keys), np.zeros((*shape, kv.value_size), values)

    def _kv_type(self, dtype: str) -> np.dtype[Any]:
        if dtype not in ROUNDINGS:
            raise EngineError(f"the reference executor has no KV dtype {dtype!r}")
        return np.dtype(np.float64) if self._mode == "exact" else KV_TYPES.get(dtype, np.dtype(np.float32))


RULES: MappingProxyType[type[v.Op], Callable[..., Array]] = MappingProxyType(
    {
        v.Embed: ReferenceExecutor._embed,
        v.RMSNorm: ReferenceExecutor._rms_norm,
        v.Linear: ReferenceExecutor._linear,
        v.Slice: ReferenceExecutor._slice,
        v.Rope: ReferenceExecutor._rope,
        v.Attention: ReferenceExecutor._attention,
        v.GatedActivation: ReferenceExecutor._gated,
        v.Add: ReferenceExecutor._add,
        v.Scale: ReferenceExecutor._scale,
        v.GatherRows: ReferenceExecutor._gather_rows,
        v.Logits: ReferenceExecutor._logits,
    }
)


def _to_wire(layers: list[Array]) -> Array:
    """[blocks, tokens, heads, size] of each layer to uint8 [blocks, layers, bytes of [head][token][size]]."""
    stacked = np.stack(layers, axis=1).swapaxes(2, 3)
    return np.ascontiguousarray(stacked).view(np.uint8).reshape(len(stacked), len(layers), -1)


def _from_wire(own: Array, blocks: Sequence[int], parts: Array) -> None:
    """uint8 [blocks, bytes] into one layer's [block, token, head, size]."""
    _, tokens, heads, size = own.shape
    values = np.ascontiguousarray(parts).view(own.dtype).reshape(len(parts), heads, tokens, size)
    own[list(blocks)] = values.swapaxes(1, 2)


def _wide(env: dict[int, Array], value: v.Value) -> m.Array:
    return env[value.id].astype(np.float64)


def _last_uses(program: v.Program) -> list[list[int]]:
    """For each op, the values that nobody reads after it."""
    last = {op.out.id: index for index, op in enumerate(program.ops)}
    for index, op in enumerate(program.ops):
        last.update({value.id: index for value in inputs(op)})
    dead: list[list[int]] = [[] for _ in program.ops]
    for value, index in last.items():
        if value != program.ops[-1].out.id:
            dead[index].append(value)
    return dead
