"""build_engine: from a configuration to an engine that is ready to step.

Owns the order of construction and the values that "choose" stands for. Must not know how any part works. Heavy rooms
are imported inside the functions, so that importing this module is quick.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from yeoul.config import BLOCK_SIZE, EngineConfig, isa_override
from yeoul.engine.client import EngineInfo
from yeoul.engine.clock import Clock, WallClock
from yeoul.engine.loop import Engine, EngineParts
from yeoul.engine.machine import available_cpus, available_memory, describe_machine
from yeoul.engine.model_defaults import read_sampling_defaults
from yeoul.engine.step_log import HeaderRecord, StepLog
from yeoul.errors import ConfigError
from yeoul.exec.protocol import Executor, ExecutorLimits
from yeoul.kv.manager import KVManager
from yeoul.kv.sizing import KVGroup, KVRequest, KVSizing, how_to_fit, size_kv
from yeoul.kv.swap import SwapSpace
from yeoul.sched.policies import Policies
from yeoul.sched.room import RoomFor
from yeoul.sched.scheduler import Scheduler
from yeoul.types import KV_DTYPES

if TYPE_CHECKING:
    from yeoul.models.model import Model
    from yeoul.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DEFAULT_BATCHED_TOKENS = 512
WAITING_CONTEXTS = 64
"""max_waiting_tokens by default: this many sequences of max_model_len."""

ExecutorFactory = Callable[["Model", EngineConfig, ExecutorLimits], Executor]


def build_engine(config: EngineConfig) -> Engine:
    """Find and open the model, size the KV pool, make the executor, and put the engine together.

    Raises ConfigError (an option out of range, a pool too small), ModelFileError and UnsupportedModelError.
    """
    from yeoul.models.registry import load_model
    from yeoul.text.tokenizer import load_tokenizer
    from yeoul.weights.catalogue import find_model
    from yeoul.weights.gguf import GGUFFile

    config = resolve(config)
    file = GGUFFile.open(find_model(config.model))
    model = load_model(file, k_dtype=config.kv_cache_dtype, v_dtype=config.v_cache_dtype)
    engine = assemble(config, model, load_tokenizer(file.metadata))
    file.release()
    return engine


def resolve(config: EngineConfig) -> EngineConfig:
    """The configuration with every "choose" that needs no model made a value. Reads the environment and the machine."""
    isa = config.isa if config.isa != "auto" else isa_override() or "auto"
    k_dtype = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else "f16"
    return msgspec.structs.replace(
        config,
        isa=isa,
        num_threads=config.num_threads or available_cpus(),
        max_num_batched_tokens=config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
        kv_cache_dtype=k_dtype,
        v_cache_dtype=config.v_cache_dtype if config.v_cache_dtype != "auto" else k_dtype,
        seed=config.seed or random.SystemRandom().getrandbits(63),
        clock=config.clock or WallClock(),
    )


def assemble(config: EngineConfig, model: Model, tokenizer: Tokenizer) -> Engine:
    """An engine from a resolved configuration and a loaded model. Raises ConfigError."""
    from yeoul.text.detokenizer import OutputText
    from yeoul.text.grammar import GrammarCompiler

    wanted = kv_request(config, model, free_memory(model))
    sizing = size_kv(wanted)
    _warn_of_biased_keys(config, model)
    megabytes = sum(tensor.data.nbytes for tensor in model.weights.values()) / 1e6
    log.info("model: %s, %s, %.0f MB of weights", config.model, model.spec.architecture, megabytes)
    for line in sizing.lines:
        log.info("%s", line)
    executor = _make_executor(config, model, sizing)
    log.info("executor: %s (--executor, --isa, --num-threads)", executor.describe())
    specs = [spec for spec, _ in model.program.kv_groups]
    kv = KVManager(
        specs,
        sizing.num_blocks,
        BLOCK_SIZE,
        prefix_caching=config.enable_prefix_caching,
        allocation=config.kv_allocation,
        max_model_len=sizing.max_model_len,
    )
    clock = cast(Clock, config.clock)
    return Engine(
        EngineParts(
            info=_info(config, model, sizing, executor),
            scheduler=_scheduler(config, kv, sizing, tokenizer.end_ids, partial(how_to_fit, wanted)),
            kv=kv,
            executor=executor,
            make_text=lambda params: OutputText(
                tokenizer,
                params.stop,
                params.skip_special_tokens,
                num_unmatched=params.min_tokens,
                include_stop=params.include_stop_str_in_output,
            ),
            clock=clock,
            step_log=StepLog(_header(config, model, executor, clock), config.step_log),
            seed=config.seed,
            max_waiting_tokens=config.max_waiting_tokens or WAITING_CONTEXTS * sizing.max_model_len,
            tokenizer=tokenizer,
            grammars=GrammarCompiler(tokenizer, model.spec.vocab_size),
            metadata=model.metadata,
        )
    )


def _warn_of_biased_keys(config: EngineConfig, model: Model) -> None:
    """Biases make a few dimensions of the keys far larger than the others, which then lose their bits."""
    if KV_DTYPES[config.kv_cache_dtype].value_bytes == 1 and model.has_key_bias:
        log.warning(
            "kv cache: the keys of this model have a bias, and %s costs such models quality "
            "(keep keys: --kv-cache-dtype f16 --v-cache-dtype %s)",
            config.kv_cache_dtype,
            config.v_cache_dtype,
        )


def free_memory(model: Model) -> int:
    """Bytes that this process may use once the model's weights are in memory."""
    return max(0, available_memory() - sum(tensor.data.nbytes for tensor in model.weights.values()))


def kv_request(config: EngineConfig, model: Model, available: int) -> KVRequest:
    """What a resolved configuration asks of the KV pool where `available` bytes are free beside the weights."""
    return KVRequest(
        groups=tuple(KVGroup(spec, len(layers)) for spec, layers in model.program.kv_groups),
        block_size=BLOCK_SIZE,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        model_context=model.spec.max_context,
        available=available,
        max_model_len=config.max_model_len,
        kv_cache_memory=config.kv_cache_memory,
        num_kv_blocks=config.num_kv_blocks,
    )


def _make_executor(config: EngineConfig, model: Model, sizing: KVSizing) -> Executor:
    from yeoul.exec import create_executor

    limits = ExecutorLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=sizing.max_model_len,
        num_blocks=sizing.num_blocks,
        block_size=BLOCK_SIZE,
    )
    if config.executor_factory is None:
        return create_executor(model, config, limits)
    if not callable(config.executor_factory):
        raise ConfigError("executor_factory is not callable", param="executor_factory")
    return cast(ExecutorFactory, config.executor_factory)(model, config, limits)


def _scheduler(
    config: EngineConfig,
    kv: KVManager,
    sizing: KVSizing,
    end_ids: frozenset[int],
    room_for: RoomFor,
) -> Scheduler:
    return Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=sizing.max_model_len,
        end_tokens=frozenset(end_ids),
        room_for=room_for,
        policies=Policies(
            batching=config.batching,
            order=config.scheduling_policy,
            victim=config.preemption_victim,
            fork=config.fork,
            ageing_seconds=config.ageing_seconds,
        ),
        swap_space=SwapSpace(config.swap_space or sizing.total_bytes, sizing.block_bytes)
        if config.preemption_mode == "swap"
        else None,
    )


def _info(config: EngineConfig, model: Model, sizing: KVSizing, executor: Executor) -> EngineInfo:
    path = Path(config.model)
    return EngineInfo(
        model_name=config.served_model_name or (path.stem if path.suffix == ".gguf" else config.model),
        architecture=model.spec.architecture,
        vocab_size=model.spec.vocab_size,
        max_model_len=sizing.max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=BLOCK_SIZE,
        num_kv_tokens=sizing.num_tokens,
        executor=executor.describe(),
        sampling_defaults=read_sampling_defaults(model.metadata),
    )


def _header(config: EngineConfig, model: Model, executor: Executor, clock: Clock) -> HeaderRecord:
    return HeaderRecord(
        unix=clock.unix(),
        at=clock.now(),
        config=_plain(config),
        machine=describe_machine(),
        model=model.spec.name,
        executor=executor.describe(),
        seed=config.seed,
    )


def _plain(config: EngineConfig) -> Mapping[str, object]:
    """The options that are data."""
    values = {name: getattr(config, name) for name in config.__struct_fields__}
    return {name: value for name, value in values.items() if value is None or isinstance(value, (str, int, float))}
