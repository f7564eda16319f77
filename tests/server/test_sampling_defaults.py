"""Fields of sampling that a request leaves out: the model file's values, unless --generation-config none."""

import asyncio
import logging

import pytest
from server_kit import Kit
from tiny import tiny_model

from yeoul.cli.serve import server_parts
from yeoul.config import EngineConfig
from yeoul.errors import ConfigError
from yeoul.server.options import ServerOptions
from yeoul.types import SamplingParams

RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
CALLS = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/responses", {"input": "hi"}),
]


def sampled(kit, path, body):
    """What the engine was asked for, of the fields that can be recommended."""
    answer = kit.request("POST", path, json=body)
    assert answer.status_code == 200, answer.text
    params = kit.client.requests[-1].params
    return {name: getattr(params, name) for name in RECOMMENDED}


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_what_a_request_leaves_out_is_the_models(path, body):
    kit = Kit(sampling_defaults=RECOMMENDED)
    assert sampled(kit, path, body) == RECOMMENDED
    assert sampled(kit, path, {**body, "temperature": 0, "top_p": None}) == RECOMMENDED | {"temperature": 0.0}


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_none_is_the_apis_own(path, body):
    own = SamplingParams()
    neutral = {name: getattr(own, name) for name in RECOMMENDED}
    assert sampled(Kit(sampling_defaults=RECOMMENDED, generation_config="none"), path, body) == neutral
    assert sampled(Kit(), path, body) == neutral


def test_the_list_of_models_says_what_holds():
    for config, shown in (("auto", RECOMMENDED), ("none", {})):
        kit = Kit(sampling_defaults=RECOMMENDED, generation_config=config)
        assert kit.get("/v1/models").json()["data"][0]["sampling_defaults"] == shown


def test_other_words_are_refused():
    with pytest.raises(ConfigError, match="generation_config must be one of auto, none"):
        ServerOptions(generation_config="model.json")


@pytest.mark.parametrize(("config", "said"), [("auto", "temperature 0.6, top_k 20, from"), ("none", "the API's own")])
def test_the_start_says_them(tmp_path, caplog, config, said):
    metadata = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    model = tiny_model(tmp_path, "llama", metadata=metadata)
    options = ServerOptions(port=0, generation_config=config)
    with caplog.at_level(logging.INFO):
        parts = server_parts(EngineConfig(model=str(model), executor="reference", max_num_seqs=1), options)
    asyncio.run(parts.client.close())
    asyncio.run(parts.client.close())
    parts.text.close()
    assert f"sampling defaults: {said}" in caplog.text and "--generation-config" in caplog.text
