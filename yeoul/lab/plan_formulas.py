"""The formulas of a plan, each with its numbers put in. Owns their words; must not compute what a plan says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from yeoul.kv.sizing import KVRequest, KVSizing, concurrent_formula, human, token_formula
from yeoul.lab.ceiling import Ceiling

if TYPE_CHECKING:
    from yeoul.exec.footprint import Footprint
    from yeoul.models.model import Model

Ceilings = tuple[tuple[Ceiling, ...], Ceiling | None]


def formulas(
    model: Model, wanted: KVRequest, sizing: KVSizing, taken: Footprint, num_tokens: int, ceilings: Ceilings
) -> tuple[str, ...]:
    """One line each, in the order of the plan."""
    return (
        *_weights(model, taken),
        *_activations(model, wanted, sizing, taken),
        *_pools(wanted, sizing),
        *_requests(wanted, sizing, num_tokens),
        *_ceilings(ceilings),
        *(f"engine: {line}" for line in sizing.lines),
    )


def _weights(model: Model, taken: Footprint) -> Iterator[str]:
    from yeoul.weights.tensor import BLOCKS

    sums: dict[str, tuple[int, int]] = {}
    for tensor in model.weights.values():
        block = BLOCKS[tensor.type]
        rule = f"{tensor.type.name} in the file: {{}} values / {block.values} x {block.bytes} bytes"
        values, size = sums.get(rule, (0, 0))
        sums[rule] = (values + tensor.data.nbytes // block.bytes * block.values, size + tensor.data.nbytes)
    for rule, (values, size) in sums.items():
        yield f"weights, {rule.format(values)} = {size} bytes"
    yield (
        f"weights in memory: matrices packed in panels of 16 rows {sum(taken.packed.values())} bytes + "
        f"norms and biases as float32 {sum(taken.vectors.values())} bytes = {taken.weights} bytes"
    )


def _activations(model: Model, wanted: KVRequest, sizing: KVSizing, taken: Footprint) -> Iterator[str]:
    tokens = wanted.max_num_batched_tokens
    yield (
        f"activations: {tokens} tokens (--max-num-batched-tokens) x {taken.arena // tokens} bytes "
        f"= {taken.arena} bytes; values that are never alive together share memory"
    )
    rows = taken.logits // (4 * model.spec.vocab_size)
    yield f"logits: {rows} rows x {model.spec.vocab_size} tokens x 4 bytes = {taken.logits} bytes"
    length = sizing.max_model_len
    yield (
        f"rope tables: {length} positions (--max-model-len) x {taken.rope // length} bytes = {taken.rope} bytes "
        "at most; they grow with the longest sequence"
    )


def _pools(wanted: KVRequest, sizing: KVSizing) -> Iterator[str]:
    for index, group in enumerate(wanted.groups):
        count, size = sizing.num_blocks[index], sizing.block_bytes[index]
        yield f"kv group {index}, one token: {token_formula(group)}"
        yield (
            f"kv group {index}, pool: {count} blocks (one of them the null block) x {wanted.block_size} tokens "
            f"x {size // wanted.block_size} bytes = {count * size} bytes"
        )


def _requests(wanted: KVRequest, sizing: KVSizing, num_tokens: int) -> Iterator[str]:
    for index, group in enumerate(wanted.groups):
        counted = concurrent_formula(wanted, group, sizing.num_blocks[index], num_tokens)
        yield f"requests of {num_tokens} tokens in kv group {index}: {counted}"
    yield f"requests side by side: the least of these and --max-num-seqs {wanted.max_num_seqs}"


def _ceilings(ceilings: Ceilings) -> Iterator[str]:
    decode, prefill = ceilings
    for one in decode:
        yield f"decode, {one.rows} rows with {one.context} tokens each: {_work(one)}"
    if prefill is not None:
        yield f"prefill of {prefill.tokens} tokens: {_work(prefill)}"


def _work(one: Ceiling) -> str:
    return (
        f"weights {human(one.weight_bytes)} + KV {human(one.kv_bytes)} to move, {one.ops / 1e9:.3g} G operations, "
        f"at least {one.seconds * 1e3:.3g} ms ({one.bound}): {one.tokens} / {one.seconds:.3g} s "
        f"= {one.tokens_per_second:.4g} tokens/s"
    )
