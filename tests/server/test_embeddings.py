"""/v1/embeddings through a real engine: poolings, encodings, batches, refusals, OpenAI's client."""

from __future__ import annotations

import base64

import httpx
import numpy as np
import openai
import pytest
from engine_kit import EngineKit

from yeoul.server.openapi import EMBEDDING_PROPERTIES


@pytest.fixture(scope="module")
def kit(tiny_llama):
    kit = EngineKit(tiny_llama)
    yield kit
    kit.close()


def embed(kit, **body):
    return [np.array(one["embedding"], np.float32) for one in kit.post("/v1/embeddings", **body)["data"]]


def test_answer_shape_usage_and_unit_length(kit):
    answer = kit.post("/v1/embeddings", input=["hello there", "a"], model=kit.client.info.model_name)
    assert answer["object"] == "list" and [one["index"] for one in answer["data"]] == [0, 1]
    assert all(one["object"] == "embedding" and len(one["embedding"]) == 64 for one in answer["data"])
    count = len(kit.tokenizer.encode("hello there")) + len(kit.tokenizer.encode("a"))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    for one in answer["data"]:
        assert np.linalg.norm(one["embedding"]) == pytest.approx(1, abs=1e-5)


def test_base64_holds_the_same_float32_values(kit):
    (plain,) = embed(kit, input="hello")
    (coded,) = kit.post("/v1/embeddings", input="hello", encoding_format="base64")["data"]
    assert np.frombuffer(base64.b64decode(coded["embedding"]), "<f4").tobytes() == plain.tobytes()


def test_pooling(kit):
    """Of one token both are the same; of several they differ, and mean is the direction of the tokens' sum."""
    assert np.array_equal(embed(kit, input=[5], pooling="mean")[0], embed(kit, input=[5])[0])
    mean, last = embed(kit, input=[5, 6, 7], pooling="mean")[0], embed(kit, input=[5, 6, 7], pooling="last")[0]
    assert abs(mean @ last) < 0.999 and np.array_equal(last, embed(kit, input=[5, 6, 7])[0])


def test_input_forms_and_batches_equal_single_answers(kit):
    inputs = ["hello there", "the quick brown fox " * 8, "a", "the river"]
    for pooling in ("last", "mean"):
        together = embed(kit, input=inputs, pooling=pooling)
        for text, vector in zip(inputs, together, strict=True):
            ids = kit.tokenizer.encode(text)
            assert np.array_equal(embed(kit, input=text, pooling=pooling)[0], vector)
            assert np.array_equal(embed(kit, input=[ids], pooling=pooling)[0], vector)
    assert len({vector.tobytes() for vector in together}) == 4


def test_embeddings_beside_generation_change_nothing(kit):
    asked = ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 30, "temperature": 1, "seed": 1, "logprobs": 1})
    calls = [asked, ("/v1/embeddings", {"input": "the quick brown fox " * 8, "pooling": "mean"}), asked]
    solo = [kit.request(*call).json() for call in calls]
    together = [response.json() for response in kit.together(calls)]
    assert together[1]["data"] == solo[1]["data"]
    assert [answer["choices"] for answer in together[::2]] == [answer["choices"] for answer in solo[::2]]


def test_truncation(kit):
    assert np.array_equal(embed(kit, input=[1, 2, 5, 6], truncate_prompt_tokens=2)[0], embed(kit, input=[5, 6])[0])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [384]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": ["a"] * 65}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"input": [1] * 2000}, "prompt"),
    ],
    ids=str,
)
def test_refusals_name_the_field(kit, body, param):
    assert kit.refused("/v1/embeddings", **body)["param"] == param


def test_null_is_absence_and_fields_are_documented(kit):
    plain = embed(kit, input="a")[0]
    assert np.array_equal(
        embed(kit, input="a", user="x", **dict.fromkeys(set(EMBEDDING_PROPERTIES) - {"input"}))[0], plain
    )
    for name in EMBEDDING_PROPERTIES:
        body = {"input": "a", name: {"no": "such value"}}
        assert kit.refused("/v1/embeddings", **body)["param"].startswith(name)


def test_openai_client_reads_both_encodings(kit):
    def answer(request: httpx.Request) -> httpx.Response:
        import json

        response = kit.request(request.url.path, json.loads(request.content))
        return httpx.Response(response.status_code, json=response.json())

    client = openai.OpenAI(
        base_url="http://test/v1", api_key="none", http_client=httpx.Client(transport=httpx.MockTransport(answer))
    )
    expected = embed(kit, input="hello")[0].tolist()
    name = kit.client.info.model_name
    for options in ({}, {"encoding_format": "float"}):
        found = client.embeddings.create(model=name, input="hello", **options)
        assert found.data[0].embedding == pytest.approx(expected, abs=1e-7) and found.usage.prompt_tokens > 0
