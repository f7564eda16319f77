"""make_plan: what a model takes and what fits, from its file's header alone, by the sums that size the engine.

Owns the order of the questions and the shape of the answer. Must not read weights, run anything or print; every number
of bytes comes from `kv/sizing`, `exec/footprint` or `ops/cost`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from yeoul.config import EngineConfig
from yeoul.errors import ConfigError
from yeoul.kv.sizing import (
    KVRequest,
    KVSizing,
    concurrent,
    how_to_fit,
    human,
    least_memory,
    mebibytes,
    size_kv,
    token_bytes,
)
from yeoul.lab.ceiling import Ceiling, Machine, decode_ceiling, prefill_ceiling
from yeoul.lab.plan_formulas import Ceilings, formulas

if TYPE_CHECKING:
    from yeoul.exec.footprint import Footprint
    from yeoul.models.model import Model


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The questions. Raises ConfigError for numbers below one, and for two sizes of one pool."""

    config: EngineConfig
    prompt_tokens: int
    output_tokens: int
    """Of every request."""
    memory: int | None = None
    """Bytes for weights, activations and KV together; None: the KV pool that the engine would take here."""
    machine: Machine = Machine()

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens", "memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", param=name)
        if self.memory is not None and (self.config.kv_cache_memory or self.config.num_kv_blocks):
            other = "--kv-cache-memory" if self.config.kv_cache_memory else "--num-kv-blocks"
            raise ConfigError(f"memory and {other} exclude each other: the KV pool gets what is left", param="memory")

    @property
    def num_tokens(self) -> int:
        """Prompt and output of a request."""
        return self.prompt_tokens + self.output_tokens


class Encoding(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of one encoding. Bytes."""

    name: str
    tensors: int
    values: int
    file_bytes: int
    packed_bytes: int
    """In the kernels' layout; vectors become float32, tensors that the program does not use take nothing."""


class KVPool(msgspec.Struct, frozen=True, kw_only=True):
    """One KV group and its pool. Blocks include the null block."""

    kind: str
    window: int
    layers: int
    kv_heads: int
    key_size: int
    value_size: int
    k_dtype: str
    v_dtype: str
    bytes_per_token: int
    block_bytes: int
    num_blocks: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answers. Sizes in bytes."""

    model: str
    architecture: str
    context: int
    """Tokens, as the file states it."""
    encodings: tuple[Encoding, ...]
    kv: tuple[KVPool, ...]
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    logit_bytes: int
    rope_bytes: int
    total_bytes: int
    memory: int | None
    """What was asked for."""
    kv_cache_memory: int
    """The option of that name that gives this KV pool; 0: none was needed."""
    max_model_len: int
    kv_tokens: int
    """Tokens that the smallest full pool holds."""
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes_per_token: int
    """All groups together."""
    request_tokens: int
    requests: int
    """Of so many tokens that run side by side to their end, none preempted."""
    limited_by: str
    """What to change for more requests side by side."""
    decode: tuple[Ceiling, ...]
    """One row, then `requests` rows. Empty without a machine's figures."""
    prefill: Ceiling | None
    formulas: tuple[str, ...]


def make_plan(request: PlanRequest) -> Plan:
    """Plan one model.

    Raises ConfigError, with the number that would work, for requests or weights that do not fit, and what finding and
    opening the model raises.
    """
    from yeoul.engine.build import free_memory, kv_request, resolve

    request = msgspec.structs.replace(request, config=resolve(request.config))
    model = _open(request.config)
    wanted = kv_request(request.config, model, free_memory(model))
    _check_length(request, wanted)
    if request.memory is not None:
        longest = wanted.max_model_len or wanted.model_context
        wanted = _within(request.memory, request.num_tokens, wanted, _footprint(model, wanted, longest))
    sizing = size_kv(wanted)
    count = concurrent(wanted, sizing.num_blocks, request.num_tokens)
    if count < 1:
        raise _no_room(request, wanted, sizing)
    return _answer(request, model, wanted, sizing, count)


def _open(config: EngineConfig) -> Model:
    from yeoul.models.registry import load_model
    from yeoul.weights.catalogue import find_model
    from yeoul.weights.gguf import GGUFFile

    file = GGUFFile.open(find_model(config.model))
    return load_model(file, k_dtype=config.kv_cache_dtype, v_dtype=config.v_cache_dtype)


def _footprint(model: Model, wanted: KVRequest, max_positions: int) -> Footprint:
    from yeoul.exec.footprint import footprint

    return footprint(model, max_tokens=wanted.max_num_batched_tokens, max_positions=max_positions)


def _check_length(request: PlanRequest, wanted: KVRequest) -> None:
    longest = wanted.max_model_len or wanted.model_context
    if request.num_tokens <= longest:
        return
    over = request.num_tokens - longest
    flags = how_to_fit(wanted, request.num_tokens)
    raise ConfigError(
        f"requests of {request.num_tokens} tokens do not fit into a context of {longest}",
        hint=f"take {over} tokens off --prompt-tokens or --output-tokens" + (f", or give {flags}" if flags else ""),
        param="prompt_tokens",
    )


def _within(memory: int, num_tokens: int, wanted: KVRequest, taken: Footprint) -> KVRequest:
    """The pool gets what is left of the memory. Raises ConfigError unless that holds one request."""
    left, least = memory - taken.total, least_memory(wanted, num_tokens)
    if left < least:
        needed = mebibytes(taken.total + least)
        raise ConfigError(
            f"{human(memory)} are too little: weights take {human(taken.weights)}, activations "
            f"{human(taken.total - taken.weights)}, KV of one request of {num_tokens} tokens {human(least)}",
            hint=f"give --memory {needed} or more",
            param="memory",
        )
    return msgspec.structs.replace(wanted, kv_cache_memory=left, available=left)


def _no_room(request: PlanRequest, wanted: KVRequest, sizing: KVSizing) -> ConfigError:
    return ConfigError(
        f"a request of {request.num_tokens} tokens does not fit: the KV pool holds {sizing.num_tokens}",
        hint=f"give {how_to_fit(wanted, request.num_tokens)}",
        param="kv_cache_memory",
    )


def _answer(request: PlanRequest, model: Model, wanted: KVRequest, sizing: KVSizing, count: int) -> Plan:
    taken = _footprint(model, wanted, sizing.max_model_len)
    decode, prefill = _ceilings(request, model, wanted, count)
    return Plan(
        model=request.config.model,
        architecture=model.spec.architecture,
        context=model.spec.max_context,
        encodings=_encodings(model, taken),
        kv=_pools(wanted, sizing),
        weight_bytes=taken.weights,
        kv_bytes=sizing.total_bytes,
        activation_bytes=taken.arena,
        logit_bytes=taken.logits,
        rope_bytes=taken.rope,
        total_bytes=taken.total + sizing.total_bytes,
        memory=request.memory,
        kv_cache_memory=wanted.kv_cache_memory,
        max_model_len=sizing.max_model_len,
        kv_tokens=sizing.num_tokens,
        max_num_seqs=wanted.max_num_seqs,
        max_num_batched_tokens=wanted.max_num_batched_tokens,
        kv_bytes_per_token=sum(token_bytes(group.spec) * group.num_layers for group in wanted.groups),
        request_tokens=request.num_tokens,
        requests=count,
        limited_by=_limited_by(request, wanted, sizing, taken, count),
        decode=decode,
        prefill=prefill,
        formulas=formulas(model, wanted, sizing, taken, request.num_tokens, (decode, prefill)),
    )


def _ceilings(request: PlanRequest, model: Model, wanted: KVRequest, count: int) -> Ceilings:
    """Decode in the middle of the output. Nothing where nothing is known of the machine."""
    if not request.machine.is_known:
        return (), None
    context = request.prompt_tokens + request.output_tokens // 2
    decode = tuple(decode_ceiling(model, request.machine, rows, context) for rows in sorted({1, count}))
    return decode, prefill_ceiling(model, request.machine, request.prompt_tokens, wanted.max_num_batched_tokens)


def _encodings(model: Model, taken: Footprint) -> tuple[Encoding, ...]:
    groups = defaultdict(list)
    for tensor in model.weights.values():
        groups[tensor.type].append(tensor)
    held = {**taken.packed, **taken.vectors}
    sums = [
        Encoding(
            name=kind.name,
            tensors=len(tensors),
            values=sum(_values(tensor.shape) for tensor in tensors),
            file_bytes=sum(tensor.data.nbytes for tensor in tensors),
            packed_bytes=sum(held.get(tensor.name, 0) for tensor in tensors),
        )
        for kind, tensors in groups.items()
    ]
    return tuple(sorted(sums, key=lambda one: -one.file_bytes))


def _values(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def _pools(wanted: KVRequest, sizing: KVSizing) -> tuple[KVPool, ...]:
    return tuple(
        KVPool(
            kind=str(group.spec.kind),
            window=group.spec.window,
            layers=group.num_layers,
            kv_heads=group.spec.num_kv_heads,
            key_size=group.spec.key_size,
            value_size=group.spec.value_size,
            k_dtype=group.spec.k_dtype,
            v_dtype=group.spec.v_dtype,
            bytes_per_token=token_bytes(group.spec) * group.num_layers,
            block_bytes=size,
            num_blocks=count,
        )
        for group, count, size in zip(wanted.groups, sizing.num_blocks, sizing.block_bytes, strict=True)
    )


def _limited_by(request: PlanRequest, wanted: KVRequest, sizing: KVSizing, taken: Footprint, count: int) -> str:
    """The flag that makes room for one more request, with its least value."""
    if count == wanted.max_num_seqs:
        freely = msgspec.structs.replace(wanted, max_num_seqs=1 << 30)
        held = concurrent(freely, sizing.num_blocks, request.num_tokens)
        return f"--max-num-seqs {count}; the KV pool holds {held}"
    more = least_memory(wanted, request.num_tokens, count + 1)
    if request.memory is not None:
        return f"memory; {count + 1} take --memory {mebibytes(taken.total + more)}"
    return f"the KV pool; {count + 1} take --kv-cache-memory {mebibytes(more)}"
