"""/v1/completions: its fields and its answers. Must not know chat, the tokenizer or HTTP."""

from __future__ import annotations

from typing import Any

from yeoul.errors import RequestError
from yeoul.server.wire.call import MAX_INT, Call, finish_fields, read_delivery, read_model
from yeoul.server.wire.fields import Fields, kind
from yeoul.server.wire.parse import show
from yeoul.server.wire.sampling import read_sampling
from yeoul.types import MAX_LOGPROBS, FinishReason

DEFAULT_MAX_TOKENS = 16
NEUTRAL: dict[str, tuple[Any, ...]] = {"suffix": ("",)}


class CompletionCall(Call, frozen=True, kw_only=True):
    """A checked completions request: each prompt is a text, or token ids below the vocabulary's size."""

    prompts: tuple[str | list[int], ...]


def parse_completion(
    members: dict[str, Any], *, served: tuple[str, ...], vocab_size: int, max_prompts: int, max_sequences: int
) -> CompletionCall:
    """Check a completions body. Raises RequestError or ModelNotServedError, naming the field."""
    fields = Fields(members)
    model = read_model(fields, served)
    prompts = read_prompts(fields, "prompt", vocab_size, max_prompts)
    echo = fields.boolean("echo")
    max_tokens = fields.integer("max_tokens", 0 if echo else 1, MAX_INT)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    params = read_sampling(
        fields,
        vocab_size=vocab_size,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    _check_best_of(fields, params.n)
    delivery = read_delivery(fields)
    finish_fields(fields, NEUTRAL)
    if (total := len(prompts) * params.n) > max_sequences:
        fields.refuse("n", f"times {len(prompts)} prompts is {total}; at most {max_sequences} are allowed")
    return CompletionCall(model=model, params=params, prompts=tuple(prompts), echo=echo, **delivery)


def completion_body(head: dict[str, Any], choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    """The whole answer. `head`: id, created, model."""
    return {**head, "object": "text_completion", "choices": choices, "usage": usage}


def completion_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: FinishReason | None
) -> dict[str, Any]:
    """One choice, of the whole answer or of one chunk: both have the same shape here."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def read_prompts(fields: Fields, name: str, vocab_size: int, most: int) -> list[str | list[int]]:
    """The field `name`: a string, a list of strings, token ids, or a list of lists of token ids; `most` of them."""
    value = fields.take(name)
    if value is None:
        fields.refuse(name, "is required")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        fields.refuse(name, f"must be a string, a list of strings or token ids, got {kind(value)}")
    if not value:
        fields.refuse(name, "must not be an empty list")
    if _is_id(value[0]):
        return [token_ids(name, name, value, vocab_size)]
    if len(value) > most:
        fields.refuse(name, f"holds {len(value)} entries; at most {most} are allowed")
    if isinstance(value[0], str):
        return [_text(name, index, one) for index, one in enumerate(value)]
    return [token_ids(name, f"{name}[{index}]", one, vocab_size) for index, one in enumerate(value)]


def _text(param: str, index: int, value: object) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{param}[{index}] must be a string like the first, got {kind(value)}", param=param)
    return value


def token_ids(param: str, name: str, value: object, vocab_size: int) -> list[int]:
    """A list of ids below `vocab_size`, not empty. Raises RequestError, naming `name`, for anything else."""
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list of token ids, got {kind(value)}", param=param)
    if not value:
        raise RequestError(f"{name} must not be empty", param=param)
    for position, token_id in enumerate(value):
        if not _is_id(token_id):
            raise RequestError(f"{name}[{position}] must be a token id, got {kind(token_id)}", param=param)
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name}[{position}] is token id {show(token_id)}; the model has 0 to {vocab_size - 1}", param=param
            )
    return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_best_of(fields: Fields, n: int) -> None:
    """best_of changes nothing where it equals n."""
    best_of = fields.integer("best_of", 1, MAX_INT)
    if best_of is not None and best_of != n:
        fields.refuse("best_of", f"is not supported, except equal to n ({n}); got {best_of}")
