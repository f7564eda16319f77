"""Executors: what runs a program. Owns the choice among them; each is imported only when chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from yeoul.engine.clock import WallClock
from yeoul.errors import ConfigError

if TYPE_CHECKING:
    from yeoul.config import EngineConfig
    from yeoul.engine.clock import Clock
    from yeoul.exec.protocol import Executor, ExecutorLimits
    from yeoul.models.model import Model


def create_executor(model: Model, config: EngineConfig, limits: ExecutorLimits) -> Executor:
    """The executor that `config.executor` names, built for these sizes.

    `config` is resolved: `isa` and `num_threads` are taken as they are. Raises ConfigError for an unknown name, and
    what the executor itself raises (a kernel level that this CPU does not have).
    """
    clock = (cast("Clock | None", config.clock) or WallClock()).now
    if config.executor == "native":
        from yeoul.exec.native import NativeExecutor

        return NativeExecutor(
            model, limits, isa=config.isa, num_threads=config.num_threads, clock=clock, swap_dir=config.swap_dir
        )
    from yeoul.exec.reference import ReferenceExecutor

    if config.executor == "reference":
        return ReferenceExecutor(model, limits, "as_native", clock, config.swap_dir)
    if config.executor == "reference-exact":
        return ReferenceExecutor(model, limits, "exact", clock, config.swap_dir)
    raise ConfigError(f"there is no executor {config.executor!r}", param="executor")
