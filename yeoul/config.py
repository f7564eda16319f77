"""EngineConfig and resolve(): the only place where "auto" becomes a value and where the environment is read.

Environment: YEOUL_HOME (where models are kept), YEOUL_ISA (force a kernel level), YEOUL_API_KEY (keys of the server).
Must not know the executor, the scheduler or HTTP.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from yeoul.errors import ConfigError
from yeoul.types import KV_DTYPES

if TYPE_CHECKING:
    pass

EXECUTORS = ("native", "reference", "reference-exact")
ISAS = ("auto", "generic", "avx2", "avx512", "amx", "neon")
KV_CHOICES = ("auto", *KV_DTYPES)
BATCHINGS = ("continuous", "prefill_first", "static")
SCHEDULING_POLICIES = ("fcfs", "priority", "shortest_prompt", "longest_prefix")
KV_ALLOCATIONS = ("paged", "reserve_max", "reserve_exact", "pow2")
PREEMPTION_VICTIMS = ("latest", "lowest_priority")
PREEMPTION_MODES = ("recompute", "swap")
BLOCK_SIZE = 16
"""Tokens per KV block. Fixed: one block is one vector of keys in the native attention kernel."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine is built. Every field has a flag of the same name on the command line; 0 or None means "choose".

    Raises ConfigError, naming the option, for a value out of range.
    """

    model: str
    """A catalogue name (`smollm2-135m`) or a path to a .gguf file."""
    served_model_name: str | None = None
    executor: str = "native"
    """`native`; the slow oracles `reference` (numpy, rounding as native does) and `reference-exact` (float64)."""
    isa: str = "auto"
    """Kernel level of the native executor; `auto`: YEOUL_ISA if set, else the best this CPU has."""
    num_threads: int = 0
    """0: as many as the CPU affinity and the cgroup quota allow."""
    max_model_len: int = 0
    """Longest sequence, prompt and output together; 0: the model's own context, capped by the KV pool."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 0
    """Token budget of a step; 0: 512."""
    kv_cache_dtype: str = "auto"
    """How keys are stored; auto = f16. 8-bit ones (int8, fp8_e4m3, fp8_e5m2) hold twice the tokens."""
    v_cache_dtype: str = "auto"
    """How values are stored; auto: as keys."""
    kv_cache_memory: int = 0
    """Bytes of the KV pool; 0: the least of max_num_seqs x max_model_len tokens and 25 % of the memory that is free."""
    num_kv_blocks: int = 0
    """Blocks of the full-attention pool, instead of kv_cache_memory; for tests and experiments."""
    enable_prefix_caching: bool = True
    """Share the KV of equal beginnings of prompts instead of computing it again."""
    fork: bool = True
    """Compute the prompt of n > 1 sequences once and share its blocks."""
    batching: str = "continuous"
    """`continuous`: chunks of prompts fill what running sequences leave of a step; `prefill_first`: whole prompts
    before any further token; `static`: nobody joins a batch that has started."""
    scheduling_policy: str = "fcfs"
    """Who is admitted first: `fcfs`, `priority` (lower values first), `shortest_prompt`, `longest_prefix` (cached)."""
    ageing_seconds: float = 60.0
    """After this time a request comes before all younger ones, whatever the policy."""
    kv_allocation: str = "paged"
    """`paged`: blocks as tokens come; `reserve_max`, `reserve_exact`, `pow2`: what engines did before, to compare."""
    preemption_victim: str = "latest"
    """Who goes back to the queue when blocks run out: the latest arrived, or of the lowest priority."""
    preemption_mode: str = "recompute"
    """What becomes of a victim's KV: `recompute` gives it up, `swap` keeps it outside the pool."""
    swap_space: int = 0
    """Bytes that swapped-out KV may take; beyond that victims are recomputed. 0: as much as the KV pool."""
    swap_dir: str | None = None
    """Folder for swapped-out KV; none: memory."""
    max_waiting_tokens: int = 0
    """Prompt tokens that may wait in the queue before new requests are refused with 429; 0: 64 x max_model_len."""
    seed: int = 0
    """Seed of the generator that gives unseeded requests their seed; 0: from the operating system."""
    step_log: str | None = None
    """File that gets one JSON line per step and event."""
    executor_factory: object | None = None
    """Instead of `executor`: a callable (Model, EngineConfig, ExecutorLimits) -> Executor, for the lab and tests."""
    clock: object | None = None
    """Instead of the wall clock: a yeoul.engine.clock.Clock."""

    def __post_init__(self) -> None:
        _one_of("executor", self.executor, EXECUTORS)
        _one_of("isa", self.isa, ISAS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CHOICES)
        _one_of("v_cache_dtype", self.v_cache_dtype, KV_CHOICES)
        _one_of("batching", self.batching, BATCHINGS)
        _one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _one_of("kv_allocation", self.kv_allocation, KV_ALLOCATIONS)
        _one_of("preemption_victim", self.preemption_victim, PREEMPTION_VICTIMS)
        _one_of("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        if isinstance(self.ageing_seconds, bool) or not 0 <= self.ageing_seconds <= 1e9:
            raise ConfigError(
                f"ageing_seconds must be between 0 and 1e9, got {self.ageing_seconds!r}", param="ageing_seconds"
            )
        for name in ("enable_prefix_caching", "fork"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}", param=name)
        for name, low, high in (
            ("num_threads", 0, 1024),
            ("max_model_len", 0, 1 << 24),
            ("max_num_seqs", 1, 4096),
            ("max_num_batched_tokens", 0, 1 << 20),
            ("kv_cache_memory", 0, 1 << 50),
            ("num_kv_blocks", 0, 1 << 28),
            ("swap_space", 0, 1 << 50),
            ("max_waiting_tokens", 0, 1 << 40),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer between {low} and {high}, got {value!r}", param=name)
        if self.kv_cache_memory and self.num_kv_blocks:
            raise ConfigError("kv_cache_memory and num_kv_blocks exclude each other", param="num_kv_blocks")
        for name in ("swap_space", "swap_dir"):
            if getattr(self, name) and self.preemption_mode != "swap":
                raise ConfigError(f"{name} needs preemption_mode swap", param=name)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}", param=name)


def isa_override() -> str | None:
    """YEOUL_ISA, checked. Raises ConfigError for an unknown level."""
    value = os.environ.get("YEOUL_ISA") or None
    if value is not None:
        _one_of("YEOUL_ISA", value, ISAS)
    return None if value == "auto" else value


def api_keys() -> tuple[str, ...]:
    """YEOUL_API_KEY: keys that the server accepts, separated by commas."""
    return tuple(filter(None, (key.strip() for key in os.environ.get("YEOUL_API_KEY", "").split(","))))


def home() -> Path:
    """Where models are kept: YEOUL_HOME, else the platform's cache folder (XDG_CACHE_HOME or ~/.cache) / yeoul."""
    if value := os.environ.get("YEOUL_HOME"):
        return Path(value).expanduser()
    if value := os.environ.get("XDG_CACHE_HOME"):
        return Path(value) / "yeoul"
    return Path.home() / ".cache" / "yeoul"
