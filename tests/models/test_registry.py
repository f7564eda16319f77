"""Loading models: families, what is refused and how, what is reported. Wiring itself is proven by the oracles."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import FAMILIES, K_SIZES, tiny_model

from yeoul.errors import ModelFileError, UnsupportedModelError
from yeoul.models.model import Model
from yeoul.models.registry import FAMILIES as KNOWN
from yeoul.models.registry import load_model
from yeoul.ops import vocabulary as v
from yeoul.types import KVKind
from yeoul.weights.gguf import GGUFFile


def load(path: Path) -> Model:
    return load_model(GGUFFile.open(path))


def changed(path: Path, **metadata: object) -> SimpleNamespace:
    """A file as it is, but for some keys (with "__" for "."; None removes one)."""
    file = GGUFFile.open(path)
    keys = {name.replace("__", "."): value for name, value in metadata.items()}
    merged = {key: value for key, value in {**file.metadata, **keys}.items() if value is not None}
    return SimpleNamespace(architecture=file.architecture, metadata=merged, tensors=file.tensors)


def ops(model: Model, kind: type[v.Op]) -> list:
    return [op for op in model.program.ops if isinstance(op, kind)]


def test_every_family_has_a_tiny_model():
    assert set(KNOWN) == set(FAMILIES)


def test_sizes_come_from_the_file(tiny_paths: Mapping[str, Path]):
    spec = load(tiny_paths["llama"]).spec
    assert (spec.architecture, spec.name, spec.num_layers, spec.hidden_size) == ("llama", "Tiny", 2, 64)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (4, 2, 32)
    assert (spec.intermediate_size, spec.vocab_size, spec.max_context) == (160, 384, 1024)


def test_head_size_without_key_length_is_hidden_by_heads(tmp_path: Path):
    path = tiny_model(tmp_path, "llama", head_dim=16)
    spec = load_model(changed(path, llama__attention__key_length=None, llama__attention__value_length=None)).spec
    assert spec.head_size == 16


def test_scale_follows_the_explicit_head_size(tiny_paths: Mapping[str, Path]):
    assert {op.scale for op in ops(load(tiny_paths["llama"]), v.Attention)} == {32**-0.5}


def test_kv_dtypes_reach_the_kv_specs(tiny_paths: Mapping[str, Path]):
    model = load_model(GGUFFile.open(tiny_paths["llama"]), k_dtype="f32", v_dtype="f16")
    assert {(spec.k_dtype, spec.v_dtype) for spec in model.program.kv_specs} == {("f32", "f16")}


@pytest.mark.parametrize(("family", "pattern"), [("llama", 0), ("gemma3", 2)])
def test_static_scales_of_the_kv_cache_come_from_the_file(family: str, pattern: int, tmp_path: Path):
    scales = {
        f"{family}.attention.{name}_cache_scales": values for name, values in (("k", [0.5, 2.0]), ("v", [3.0, 0.25]))
    }
    path = tiny_model(tmp_path, family, layers=2, pattern=pattern, metadata=scales)
    assert [(op.k_scale, op.v_scale) for op in ops(load(path), v.Attention)] == [(0.5, 3.0), (2.0, 0.25)]
    del scales[f"{family}.attention.v_cache_scales"]
    path = tiny_model(tmp_path, family, layers=2, pattern=pattern, metadata=scales)
    assert [(op.k_scale, op.v_scale) for op in ops(load(path), v.Attention)] == [(0.5, 1.0), (2.0, 1.0)]


@pytest.mark.parametrize("value", [[1.0], [0.0, 1.0], [float("nan"), 1.0], [1.0, 1e9], ["a", "b"], "ab", 1.0])
def test_broken_static_scales_are_refused(value: object, tmp_path: Path):
    path = tiny_model(tmp_path, "llama", layers=2, metadata={"llama.attention.k_cache_scales": value})
    with pytest.raises(ModelFileError, match=r"llama\.attention\.k_cache_scales must (be an array of 2|hold) numbers"):
        load(path)


def test_gemma_has_a_group_of_local_and_one_of_global_layers(tiny_paths: Mapping[str, Path]):
    groups = load(tiny_paths["gemma3"]).program.kv_groups
    assert [(spec.kind, spec.window, layers) for spec, layers in groups] == [
        (KVKind.WINDOW, 32, (0, 1, 2, 3, 4)),
        (KVKind.FULL, 0, (5,)),
    ]


def test_gemma_rope_bases_differ_by_kind_of_layer(tiny_paths: Mapping[str, Path]):
    ropes = ops(load(tiny_paths["gemma3"]), v.Rope)
    second = [op.rope.frequencies[1] for op in ropes]
    assert second[:10] == pytest.approx([10000 ** (-1 / 16)] * 10, rel=1e-6)
    assert second[10:] == pytest.approx([1e6 ** (-1 / 16)] * 2, rel=1e-6)


def test_gemma_scales(tiny_paths: Mapping[str, Path]):
    model = load(tiny_paths["gemma3"])
    assert [op.factor for op in ops(model, v.Scale)] == [8.0]
    assert {op.scale for op in ops(model, v.Attention)} == {32**-0.5}


def test_gemma_27b_scales_by_hidden_over_heads(tmp_path: Path):
    model = load(tiny_model(tmp_path, "gemma3", layers=62, ffn=32))
    assert {op.scale for op in ops(model, v.Attention)} == {(64 / 4) ** -0.5}


def test_rope_style_by_family(tiny_paths: Mapping[str, Path]):
    for family, path in tiny_paths.items():
        assert {op.rope.interleaved for op in ops(load(path), v.Rope)} == {family == "llama"}


def test_tied_and_untied_output(tmp_path: Path):
    assert load(tiny_model(tmp_path, "llama", seed=1)).program.ops[-1].weight == "token_embd.weight"
    assert load(tiny_model(tmp_path, "llama", seed=2, tied=False)).program.ops[-1].weight == "output.weight"


def test_biases_of_the_file_are_used(tmp_path: Path):
    names = ("attn_q", "attn_output", "ffn_gate", "ffn_down")
    model = load(tiny_model(tmp_path, "llama", bias=names))
    found = {segment.bias for op in ops(model, v.Linear) for segment in op.segments} - {None}
    assert found == {f"blk.{layer}.{name}.bias" for layer in (0, 1) for name in names}


def test_k_quants_load(tmp_path: Path):
    load(tiny_model(tmp_path, "qwen2", **K_SIZES))


def test_unused_tensors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    extra = tuple(f"blk.0.strange{i}.weight" for i in range(10))
    with caplog.at_level(logging.WARNING, "yeoul"):
        load(tiny_model(tmp_path, "llama", extra=extra))
    (record,) = caplog.records
    message = record.getMessage()
    assert "10 tensors" in message
    assert "blk.0.strange0.weight, blk.0.strange1.weight" in message
    assert message.endswith("and 2 more")


def test_nothing_is_reported_when_all_is_used(tiny_paths: Mapping[str, Path], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "yeoul"):
        for path in tiny_paths.values():
            load(path)
    assert not caplog.records


def test_an_unknown_architecture_names_itself_and_the_known_ones(tiny_paths: Mapping[str, Path]):
    file = GGUFFile.open(tiny_paths["llama"])
    other = SimpleNamespace(architecture="mamba", metadata=file.metadata, tensors=file.tensors)
    with pytest.raises(UnsupportedModelError, match="'mamba'") as caught:
        load_model(other)
    assert caught.value.hint == "Yeoul runs gemma3, llama, qwen2"


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("llama", "token_embd.weight"),
        ("llama", "output_norm.weight"),
        ("llama", "blk.1.attn_k.weight"),
        ("llama", "blk.0.ffn_down.weight"),
        ("qwen2", "blk.1.attn_v.bias"),
        ("gemma3", "blk.5.attn_q_norm.weight"),
        ("gemma3", "blk.2.post_ffw_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, family: str, tensor: str):
    with pytest.raises(ModelFileError, match=f"tensor '{tensor}' is missing"):
        load(tiny_model(tmp_path, family, omit=(tensor,)))


def test_a_wrong_shape_is_named_with_both_shapes(tiny_paths: Mapping[str, Path]):
    with pytest.raises(ModelFileError, match=r"'blk.0.attn_q.weight' has shape \(128, 64\), expected \(256, 64\)"):
        load_model(changed(tiny_paths["llama"], llama__attention__head_count=8))
    with pytest.raises(ModelFileError, match=r"'token_embd.weight' has shape \(384, 64\), expected \(any, 128\)"):
        load_model(changed(tiny_paths["llama"], llama__embedding_length=128))


HOSTILE = [
    ({"block_count": 0}, "llama.block_count must be between 1 and 1024, not 0"),
    ({"block_count": 2**32 - 1}, "must be between"),
    ({"block_count": 3}, "tensor 'blk.2.attn_norm.weight' is missing"),
    ({"block_count": None}, "the key llama.block_count is missing"),
    ({"block_count": "2"}, "must be an integer, not '2'"),
    ({"block_count": True}, "must be an integer, not True"),
    ({"block_count": 2.0}, "must be an integer, not 2.0"),
    ({"embedding_length": 2**40}, "must be between"),
    ({"attention__head_count": 0}, "must be between"),
    ({"attention__head_count": [4, 4]}, "must be an integer"),
    ({"attention__head_count_kv": 3}, "4 attention heads do not divide into 3 KV heads"),
    ({"attention__head_count_kv": 8}, "do not divide into 8 KV heads"),
    ({"attention__key_length": 33, "attention__value_length": 33}, "must be even"),
    ({"attention__key_length": 2**31}, "must be between"),
    ({"attention__key_length": None, "attention__head_count": 5, "attention__head_count_kv": 5}, "no key_length"),
    ({"attention__layer_norm_rms_epsilon": 0.0}, "must be between 1e-12 and 0.1, not 0"),
    ({"attention__layer_norm_rms_epsilon": -1e-5}, "must be between"),
    ({"attention__layer_norm_rms_epsilon": float("nan")}, "must be between"),
    ({"attention__layer_norm_rms_epsilon": None}, "is missing"),
    ({"context_length": 0}, "must be between"),
    ({"feed_forward_length": -1}, "must be between"),
    ({"rope__freq_base": float("inf")}, "must be between"),
    ({"rope__freq_base": 0.0}, "must be between"),
    ({"rope__dimension_count": 31}, "must be even, not 31"),
    ({"rope__dimension_count": 64}, "must be between 2 and 32, not 64"),
    ({"rope__scaling__type": 7}, "must be a string"),
    ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, "must be between"),
    ({"rope__scaling__type": "llama3", "rope__scaling__low_freq_factor": 4.0}, "must be above"),
    ({"attention__sliding_window": -5}, "must be between"),
    ({"attention__scale": -1.0}, "must be between"),
]


@pytest.mark.parametrize(("keys", "message"), HOSTILE)
def test_hostile_numbers_are_refused(tiny_paths: Mapping[str, Path], keys: dict[str, object], message: str):
    with pytest.raises(ModelFileError) as caught:
        load_model(changed(tiny_paths["llama"], **{f"llama__{key}": value for key, value in keys.items()}))
    assert message in caught.value.message


@pytest.mark.parametrize(
    "keys",
    [
        {"expert_count": 8},
        {"expert_count": np.zeros(3, np.int32)},
        {"rope__scaling__type": "yarn"},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"attention__causal": False},
        {"logit_scale": 0.5},
        {"attention__value_length": 16},
    ],
)
def test_what_would_change_the_result_is_not_ignored(tiny_paths: Mapping[str, Path], keys: dict[str, object]):
    with pytest.raises(UnsupportedModelError):
        load_model(changed(tiny_paths["llama"], **{f"llama__{key}": value for key, value in keys.items()}))


def test_neutral_values_of_the_same_keys_are_accepted(tiny_paths: Mapping[str, Path]):
    keys = {"expert_count": 0, "attention__causal": True, "logit_scale": 1.0, "rope__scaling__type": "none"}
    load_model(changed(tiny_paths["llama"], **{f"llama__{key}": value for key, value in keys.items()}))


@pytest.mark.parametrize("value", [0, -1, True, [True, False]])
def test_gemma_refuses_a_strange_pattern(tiny_paths: Mapping[str, Path], value: object):
    with pytest.raises((ModelFileError, UnsupportedModelError), match="sliding_window_pattern"):
        load_model(changed(tiny_paths["gemma3"], gemma3__attention__sliding_window_pattern=value))


def test_rope_factors_must_be_positive(tmp_path: Path):
    factors = (1.0,) * 15 + (0.0,)
    with pytest.raises(ModelFileError, match="must hold positive numbers"):
        load(tiny_model(tmp_path, "llama", rope_factors=factors))
