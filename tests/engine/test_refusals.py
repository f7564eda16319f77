"""What an engine refuses for want of room names the number to change; applied, that number works."""

import asyncio
import re

import pytest

from yeoul.config import EngineConfig
from yeoul.engine.build import build_engine
from yeoul.engine.loop import Engine
from yeoul.errors import CapacityError, ContextLengthError
from yeoul.server.text_service import TextService
from yeoul.types import Request, SamplingParams


def request(num_tokens: int, request_id: str = "a") -> Request:
    return Request(request_id=request_id, prompt_token_ids=[5] * num_tokens, params=SamplingParams(max_tokens=4))


def engine(path, **options: object) -> Engine:
    return build_engine(EngineConfig(model=str(path), executor="reference", **options))


def flags(hint: str) -> dict[str, int]:
    found = re.findall(r"--([a-z-]+) (\d+)(MiB)?", hint)
    return {name.replace("-", "_"): int(value) << (20 if unit else 0) for name, value, unit in found}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 9},
        {"max_model_len": 100},
        {"max_model_len": 100, "num_kv_blocks": 5},
        {"max_num_batched_tokens": 64, "num_kv_blocks": 3},
    ],
    ids=str,
)
def test_a_prompt_without_room_is_told_which_flag_makes_it(tiny_paths, family, options):
    with pytest.raises(ContextLengthError) as caught:
        engine(tiny_paths[family], **options).check(request(900))
    hint = caught.value.hint
    held = int(re.search(r"at most (\d+) fit", str(caught.value))[1])
    assert hint.startswith(f"shorten the prompt by {901 - held} tokens, or start the engine with --")
    engine(tiny_paths[family], **options | flags(hint)).check(request(900))


def test_a_prompt_over_the_models_context_can_only_be_shortened(tiny_llama):
    with pytest.raises(ContextLengthError) as caught:
        engine(tiny_llama).check(request(1024))
    assert caught.value.hint == "shorten the prompt by 1 tokens"


def test_a_full_queue_names_the_limit_that_would_take_the_request(tiny_llama):
    def check_second(limit: int) -> None:
        small = engine(tiny_llama, max_waiting_tokens=limit)
        small.add(request(30))
        small.check(request(40, "b"))

    with pytest.raises(CapacityError) as caught:
        check_second(50)
    (limit,) = flags(caught.value.hint).values()
    check_second(limit)


def test_a_text_beyond_every_context_is_told_by_how_much(tiny_llama):
    small = engine(tiny_llama, max_model_len=4)
    service = TextService(small.tokenizer, None, max_model_len=4)
    try:
        with pytest.raises(ContextLengthError) as caught:
            asyncio.run(service.encode("a" * 100_000))
    finally:
        service.close()
    most = int(re.search(r"at most (\d+)", str(caught.value))[1])
    assert caught.value.hint == f"shorten the prompt by {100_000 - most} characters"
