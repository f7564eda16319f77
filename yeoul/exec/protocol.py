"""What an executor is: it runs StepPlans. Owns the protocol only; must not know the scheduler, requests or text."""

from __future__ import annotations

from typing import TYPE_CHECKING, NewType, Protocol

import msgspec

from yeoul.step import StepPlan, StepResult

if TYPE_CHECKING:
    import numpy as np

Ticket = NewType("Ticket", int)


class Executor(Protocol):
    """Runs plans in the order submitted. One thread (the engine's) calls all methods.

    Between two plans an executor keeps, per slot: block tables, sampling state, the last sampled token.
    """

    max_in_flight: int
    """How many submitted plans may wait for collect; 1 for executors that compute inside submit or collect."""

    def submit(self, plan: StepPlan) -> Ticket:
        """Take a plan. Mutates slots and KV. The plan must fit the sizes that the executor was built with."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a plan and return its result. Raises EngineError if the execution failed as a whole."""
        ...

    def logits(self, plan: StepPlan) -> np.ndarray:
        """Run a plan and return the logits of every token instead of sampling: float32 [num_tokens, vocab].

        For quality measurements and tests; `sample` flags are ignored, slots advance as in submit.
        """
        ...

    def describe(self) -> str:
        """One line for the start-up log: which kernels, why, how many threads."""
        ...

    def close(self) -> None:
        """Free threads and memory. Idempotent."""
        ...


class ExecutorLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes an executor is built for."""

    max_num_seqs: int
    """Slots: 0 .. max_num_seqs - 1."""
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: tuple[int, ...]
    """Blocks of each KV group's pool, the null block included, in the order of Program.kv_groups."""
    block_size: int
