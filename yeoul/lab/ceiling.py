"""Ceilings: how fast a step can be at most, by the bytes it must move and the operations it must do.

The roofline model (Williams, Waterman and Patterson, 2009).

Owns that division; the work comes from `ops/cost`, the machine's figures from whoever asks. Must not measure anything.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from yeoul.errors import ConfigError
from yeoul.ops.cost import Cost, StepShape, program_cost, weight_sizes

if TYPE_CHECKING:
    from yeoul.models.model import Model


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine can do at most; None: unknown. Raises ConfigError for a figure that is not above 0."""

    bandwidth: float | None = None
    """Bytes read per second."""
    ops: float | None = None
    """Operations per second; a multiply-add is two."""

    def __post_init__(self) -> None:
        for name, unit in (("bandwidth", "GB/s, such as 25"), ("ops", "TOP/s, such as 1.5")):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a number above 0", hint=f"give it in {unit}", param=name)

    @property
    def is_known(self) -> bool:
        """Whether there is any figure."""
        return self.bandwidth is not None or self.ops is not None


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """The least time of some work. Bytes: the file's weights, and the KV read and written."""

    rows: int
    tokens: int
    """That are computed: one per row in decode, the prompt in prefill."""
    context: int
    """Tokens that each row sees."""
    weight_bytes: int
    kv_bytes: int
    ops: int
    seconds: float
    tokens_per_second: float
    bound: str
    """`memory` or `compute`: the side that takes longer, by the figures that are known."""


def decode_ceiling(model: Model, machine: Machine, rows: int, context: int) -> Ceiling:
    """One token for each of `rows` sequences that have `context` tokens."""
    shape = StepShape(((context, 1),) * rows, rows)
    return _ceiling(model, machine, [shape], rows=rows, context=context)


def prefill_ceiling(model: Model, machine: Machine, prompt: int, chunk: int) -> Ceiling:
    """A prompt alone, in steps of at most `chunk` tokens; only the last one needs logits."""
    starts = range(0, prompt, chunk)
    shapes = [StepShape(((at, min(chunk, prompt - at)),), int(at + chunk >= prompt)) for at in starts]
    return _ceiling(model, machine, shapes, rows=1, context=prompt)


def _ceiling(model: Model, machine: Machine, steps: list[StepShape], *, rows: int, context: int) -> Ceiling:
    sizes = weight_sizes(model.weights)
    costs = [program_cost(model.program, sizes, shape) for shape in steps]
    memory = sum(_divide(_bytes(cost), machine.bandwidth) for cost in costs)
    compute = sum(_divide(cost.flops, machine.ops) for cost in costs)
    # Each step waits for the slower of the two.
    seconds = sum(max(_divide(_bytes(cost), machine.bandwidth), _divide(cost.flops, machine.ops)) for cost in costs)
    tokens = sum(shape.num_tokens for shape in steps)
    return Ceiling(
        rows=rows,
        tokens=tokens,
        context=context,
        weight_bytes=sum(cost.weight_bytes for cost in costs),
        kv_bytes=sum(cost.kv_read_bytes + cost.kv_write_bytes for cost in costs),
        ops=sum(cost.flops for cost in costs),
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        bound="compute" if compute > memory else "memory",
    )


def _bytes(cost: Cost) -> int:
    """Activations stay in the caches."""
    return cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes


def _divide(work: int, rate: float | None) -> float:
    return 0.0 if rate is None else work / rate
