"""GGUFFile on sound files: written by the `gguf` package, read by ours."""

from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny import tiny_model

from yeoul.errors import ModelFileError, YeoulError
from yeoul.weights.catalogue import CATALOGUE, find_model
from yeoul.weights.ggml_types import TYPE_NAMES
from yeoul.weights.gguf import GGUFFile
from yeoul.weights.tensor import BLOCKS, TensorType

TOKENS = ["<s>", "", "한국어", "🙂", "a b", "\n"]


def write(path, *, tensors=(), fill=None):
    writer = gguf.GGUFWriter(path, "llama")
    if fill is not None:
        fill(writer)
    for name, values, kind in tensors:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_scalars_have_their_values(tmp_path):
    def fill(w):
        w.add_uint8("u8", 255)
        w.add_int8("i8", -128)
        w.add_uint16("u16", 65535)
        w.add_int16("i16", -32768)
        w.add_uint32("u32", 2**32 - 1)
        w.add_int32("i32", -(2**31))
        w.add_float32("f32", 0.25)
        w.add_bool("yes", True)
        w.add_bool("no", False)
        w.add_string("text", "여울")
        w.add_uint64("u64", 2**64 - 1)
        w.add_int64("i64", -(2**63))
        w.add_float64("f64", 1e300)

    metadata = GGUFFile.open(write(tmp_path / "m.gguf", fill=fill)).metadata
    expected = {"u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31), "f32": 0.25}
    expected |= {"yes": True, "no": False, "text": "여울", "u64": 2**64 - 1, "i64": -(2**63), "f64": 1e300}
    assert {key: metadata[key] for key in expected} == expected
    assert type(metadata["yes"]) is bool
    assert type(metadata["u8"]) is int


def test_arrays(tmp_path):
    def fill(w):
        w.add_string("odd", "x" * 3)  # so that what follows is not aligned
        w.add_array("floats", [0.5, -1.5])
        w.add_array("ints", [1, -2, 3])
        w.add_array("flags", [True, False])
        w.add_array("tokens", TOKENS)

    metadata = GGUFFile.open(write(tmp_path / "m.gguf", fill=fill)).metadata
    assert metadata["floats"].dtype == np.float32
    assert metadata["floats"].tolist() == [0.5, -1.5]
    assert metadata["ints"].dtype == np.int32
    assert metadata["ints"].tolist() == [1, -2, 3]
    assert metadata["flags"].tolist() == [True, False]
    with pytest.raises(ValueError, match="read-only"):
        metadata["ints"][0] = 7


def test_string_array_is_a_sequence(tmp_path):
    tokens = GGUFFile.open(write(tmp_path / "m.gguf", fill=lambda w: w.add_array("t", TOKENS))).metadata["t"]
    assert len(tokens) == len(TOKENS)
    assert list(tokens) == TOKENS
    assert [tokens[i] for i in range(len(TOKENS))] == TOKENS
    assert tokens[-1] == TOKENS[-1]
    assert tokens[1:4] == TOKENS[1:4]
    assert tokens.bytes_at(2) == TOKENS[2].encode()
    assert list(tokens.iter_bytes()) == [token.encode() for token in TOKENS]
    assert "🙂" in tokens
    assert tokens.index("a b") == 4
    for outside in (len(TOKENS), -len(TOKENS) - 1):
        with pytest.raises(IndexError):
            tokens[outside]


def test_strings_that_are_not_utf8_keep_their_bytes(tmp_path):
    path = write(tmp_path / "m.gguf", fill=lambda w: w.add_array("t", ["abcd", "ok"]))
    path.write_bytes(path.read_bytes().replace(b"abcd", b"a\xff\xfed"))
    tokens = GGUFFile.open(path).metadata["t"]
    assert tokens.bytes_at(0) == b"a\xff\xfed"
    assert list(tokens) == ["a\ufffd\ufffdd", "ok"]


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_tensors_are_where_they_were_put(tmp_path, alignment):
    rng = np.random.default_rng(0)
    tensors = [
        ("vector", rng.standard_normal(7).astype(np.float32), gguf.GGMLQuantizationType.F32),
        ("matrix", rng.standard_normal((3, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0),
        ("cube", rng.standard_normal((2, 3, 5)).astype(np.float32), gguf.GGMLQuantizationType.F16),
    ]

    def fill(w):
        w.add_custom_alignment(alignment)

    file = GGUFFile.open(write(tmp_path / "m.gguf", tensors=tensors, fill=fill))
    assert list(file.tensors) == ["vector", "matrix", "cube"]
    for name, values, kind in tensors:
        tensor = file.tensors[name]
        assert tensor.name == name
        assert tensor.shape == values.shape
        assert tensor.type.name == kind.name
        assert tensor.data.tobytes() == gguf.quants.quantize(values, kind).tobytes()
        assert tensor.data.ctypes.data % 8 == 0
        assert not tensor.data.flags.writeable


def test_path_size_and_architecture(tmp_path):
    path = write(tmp_path / "m.gguf")
    file = GGUFFile.open(str(path))
    assert file.path == path
    assert file.size == path.stat().st_size
    assert file.architecture == "llama"


def test_architecture_may_be_missing(tmp_path):
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.architectura"))
    file = GGUFFile.open(path)
    with pytest.raises(ModelFileError, match="architecture"):
        _ = file.architecture


def test_what_was_taken_outlives_the_file(tmp_path):
    values = np.arange(8, dtype=np.float32)
    path = write(
        tmp_path / "m.gguf",
        tensors=[("x", values, gguf.GGMLQuantizationType.F32)],
        fill=lambda w: w.add_array("t", TOKENS),
    )
    with GGUFFile.open(path) as file:
        tensor, tokens = file.tensors["x"], file.metadata["t"]
    path.unlink()
    assert tensor.data.view(np.float32).tolist() == values.tolist()
    assert list(tokens) == TOKENS
    assert not file.tensors
    assert not file.metadata


def test_names_and_blocks_are_those_of_ggml():
    for kind in gguf.GGMLQuantizationType:
        assert TYPE_NAMES[kind.value] == kind.name
    for kind in TensorType:
        assert TYPE_NAMES[kind.value] == kind.name
        assert tuple(BLOCKS[kind]) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind.value)]


def real(name):
    try:
        return find_model(name)
    except YeoulError as error:
        pytest.skip(f"{error}: {error.hint}")


FACTS = {
    "smollm2-135m": ("llama", 49152, "()", {"Q4_1": 210, "F32": 61, "Q8_0": 1}),
    "gemma3-270m": ("gemma3", 262144, "put", {"F32": 109, "Q5_0": 81, "Q4_K": 27, "Q8_0": 10, "Q6_K": 9}),
    "qwen2.5-coder-0.5b": ("qwen2", 151936, "atus", {"Q5_0": 133, "F32": 121, "Q8_0": 13, "Q6_K": 12, "Q4_K": 12}),
    "qwen2.5-coder-1.5b": ("qwen2", 151936, "atus", {"Q4_K": 169, "F32": 141, "Q6_K": 29}),
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_real_files(name):
    architecture, num_tokens, token, types = FACTS[name]
    file = GGUFFile.open(real(name))
    assert file.size == CATALOGUE[name].size
    assert file.architecture == architecture
    assert Counter(tensor.type.name for tensor in file.tensors.values()) == types
    assert all(tensor.data.ctypes.data % 32 == 0 for tensor in file.tensors.values())
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert tokens[1000] == token
    assert len(list(tokens)) == len(tokens) == num_tokens


def test_a_real_file_as_the_gguf_package_reads_it():
    path = real("smollm2-135m")
    file, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert ours.type.name == tensor.tensor_type.name
        np.testing.assert_array_equal(ours.data, tensor.data.reshape(-1).view(np.uint8))
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for name, field in fields.items():
        if "tokens" not in name and "merges" not in name:
            ours = file.metadata[name]
            assert (list(ours) if isinstance(field.contents(), list) else ours) == field.contents()


def test_released_pages_come_back(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    with GGUFFile.open(path) as file, GGUFFile.open(path) as untouched:
        file.release()
        for name, tensor in file.tensors.items():
            assert np.array_equal(tensor.data, untouched.tensors[name].data)
