"""GGUFFile on files that are damaged or made to harm: one clear error, never a signal, never a big allocation."""

import os
import random
import struct
import tracemalloc

import gguf
import numpy as np
import pytest

from yeoul.errors import ModelFileError, UnsupportedModelError, YeoulError
from yeoul.weights.dequant import dequantize
from yeoul.weights.gguf import GGUFFile, StringArray
from yeoul.weights.tensor import TensorType

U8, U32, BOOL, STRING, ARRAY, U64 = 0, 4, 7, 8, 9, 10


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return u64(len(raw)) + raw


def pair(key, kind, value):
    return string(key) + u32(kind) + value


def record(name="w", shape=(8,), kind=TensorType.F32, offset=0, num_dims=None):
    dims = b"".join(u64(size) for size in shape)
    return string(name) + u32(len(shape) if num_dims is None else num_dims) + dims + u32(kind) + u64(offset)


def header(num_tensors=0, num_keys=0, version=3, magic=b"GGUF"):
    return magic + u32(version) + u64(num_tensors) + u64(num_keys)


def build(pairs=(), records=(), data=bytes(256), alignment=32):
    """A whole file, right in all that its parts do not make wrong."""
    head = header(len(records), len(pairs)) + b"".join(pairs) + b"".join(records)
    return head + bytes(-len(head) % alignment) + data


def try_open(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return GGUFFile.open(path)


def refuse(tmp_path, content, match, error=ModelFileError):
    with pytest.raises(error, match=match) as caught:
        try_open(tmp_path, content)
    assert "m.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_the_builder_builds_sound_files(tmp_path):
    pairs = [pair("a", U32, u32(7)), pair("b", ARRAY, u32(STRING) + u64(2) + string("x") + string("y"))]
    file = try_open(tmp_path, build(pairs, [record("w", (8, 4)), record("v", (8,), offset=128)]))
    assert file.metadata["a"] == 7
    assert list(file.metadata["b"]) == ["x", "y"]
    assert file.tensors["w"].shape == (4, 8)
    assert file.tensors["v"].shape == (8,)


HEADERS = {
    "magic": (header(magic=b"GGML"), "not a GGUF file"),
    "html": (b"<!DOCTYPE html><html>", "not a GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS"),
    "half a magic": (b"GG", "not a GGUF file"),
    "only a magic": (b"GGUF", "version"),
    "too many tensors": (header(num_tensors=2**63) + bytes(64), "number of tensors"),
    "too many keys": (header(num_keys=2**64 - 1) + bytes(64), "number of keys"),
    "one key too many": (header(num_keys=1), "number of keys"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers(tmp_path, case):
    refuse(tmp_path, *HEADERS[case])


@pytest.mark.parametrize(("version", "match"), [(0x03000000, "big-endian"), (1, "version 1"), (4, "version 4")])
def test_versions(tmp_path, version, match):
    refuse(tmp_path, header(version=version), match, UnsupportedModelError)


def test_version_2_is_read(tmp_path):
    assert try_open(tmp_path, header(version=2)).tensors == {}


PAIRS = {
    "empty key": (pair("", U32, u32(1)), "name of key 0 is 0 bytes"),
    "long key": (pair("k" * 65536, U32, u32(1)), "65536 bytes"),
    "key past the end": (u64(10**6) + b"abc" + bytes(64), "name of key 0 ends past"),
    "key wraps around": (u64(2**64 - 8) + bytes(64), "name of key 0 ends past"),
    "key not UTF-8": (pair(b"\xff\xfe", U32, u32(1)), "not UTF-8"),
    "key with a line break": (pair("a\nb", U32, u32(1)), "control"),
    "unknown type": (pair("k", 13, u32(1)), "unknown type 13"),
    "truth of 2": (pair("k", BOOL, b"\x02") + bytes(16), "truth"),
    "string past the end": (pair("k", STRING, u64(10**6) + b"abc"), "value of 'k' ends past"),
    "string wraps around": (pair("k", STRING, u64(2**64 - 1) + b"abc"), "value of 'k' ends past"),
    "array of an unknown type": (pair("k", ARRAY, u32(77) + u64(1) + bytes(8)), "unknown type 77"),
    "array too long": (pair("k", ARRAY, u32(U32) + u64(10**6) + bytes(8)), "length of the value of 'k'"),
    "array wraps around": (pair("k", ARRAY, u32(U64) + u64(2**61 + 1) + bytes(8)), "length of the value of 'k'"),
    "strings too many": (pair("k", ARRAY, u32(STRING) + u64(2**61) + bytes(8)), "length of the value of 'k'"),
    "a string of many past the end": (
        pair("k", ARRAY, u32(STRING) + u64(2) + string("a") + u64(2**63) + bytes(512)),
        "value of 'k'.*past the end",
    ),
    "truths of 2": (pair("k", ARRAY, u32(BOOL) + u64(3) + b"\x00\x01\x02" + bytes(8)), "truth"),
}


@pytest.mark.parametrize("case", PAIRS)
def test_pairs(tmp_path, case):
    content, match = PAIRS[case]
    refuse(tmp_path, header(num_keys=1) + content, match)


def test_a_key_twice(tmp_path):
    refuse(tmp_path, build([pair("k", U32, u32(1)), pair("k", U32, u32(2))]), "'k' occurs twice")


def test_nested_arrays(tmp_path):
    nested = pair("k", ARRAY, u32(ARRAY) + u64(1) + u32(U32) + u64(1) + u32(1))
    refuse(tmp_path, build([nested]), "array of arrays", UnsupportedModelError)


def test_part_of_a_split_model(tmp_path):
    refuse(tmp_path, build([pair("split.count", U32, u32(3))]), "one of 3 parts", UnsupportedModelError)


@pytest.mark.parametrize("value", [0, 1, 24, 33, 2**31 + 1])
def test_alignments(tmp_path, value):
    refuse(tmp_path, build([pair("general.alignment", U32, u32(value))]), "power of two")


def test_alignment_of_another_type(tmp_path):
    refuse(tmp_path, build([pair("general.alignment", STRING, string("32"))]), "power of two")


def test_alignment_past_the_end(tmp_path):
    refuse(tmp_path, build([pair("general.alignment", U32, u32(2**31))], [record()]), "tensor 'w' ends past")


RECORDS = {
    "empty name": (record(""), "name of tensor 0"),
    "long name": (record("n" * 128), "128 bytes"),
    "no dimensions": (record(shape=()), "0 dimensions"),
    "nine dimensions": (record(shape=(1,) * 9), "9 dimensions"),
    "2**32 - 1 dimensions": (record(num_dims=2**32 - 1), "dimensions"),
    "a dimension of 0": (record(shape=(8, 0)), "empty shape"),
    "a huge dimension": (record(shape=(2**62,)), "tensor 'w' ends past"),
    "a product that wraps around": (record(shape=(2**32, 2**32)), "tensor 'w' ends past"),
    "four that wrap around": (record(shape=(2**63, 2**63, 2**63, 2**63)), "tensor 'w' ends past"),
    "half a block": (record(shape=(48,), kind=TensorType.Q4_0), "48 columns"),
    "half a row's block": (record(shape=(16, 2), kind=TensorType.Q8_0), "16 columns"),
    "unknown type": (record(kind=1000), "unknown type 1000"),
    "offset not aligned": (record(offset=8), "not aligned"),
    "offset past the end": (record(offset=1024), "tensor 'w' ends past"),
    "offset 2**63": (record(offset=2**63), "tensor 'w' ends past"),
    "offset wraps around": (record(offset=2**64 - 32), "tensor 'w' ends past"),
    "last byte outside": (record(shape=(65,)), "tensor 'w' ends past"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_records(tmp_path, case):
    content, match = RECORDS[case]
    refuse(tmp_path, build(records=[content]), match)


def test_a_tensor_twice(tmp_path):
    refuse(tmp_path, build(records=[record(), record(offset=32)]), "'w' occurs twice")


def test_tensors_overlap(tmp_path):
    refuse(tmp_path, build(records=[record("a", (16,)), record("b", (8,), offset=32)]), "'a' and 'b' overlap")


@pytest.mark.parametrize("name", ["IQ2_XS", "Q2_K", "Q3_K", "TQ1_0", "MXFP4", "I32", "F64"])
def test_types_that_are_not_read_are_named(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name].value
    refuse(tmp_path, build(records=[record("blk.0.w", (256,), kind)]), f"'blk.0.w' is {name}", UnsupportedModelError)


def test_a_missing_file(tmp_path):
    with pytest.raises(ModelFileError, match="no such file") as caught:
        GGUFFile.open(tmp_path / "none.gguf")
    assert "yeoul pull" in caught.value.hint


def test_what_is_not_a_file(tmp_path):
    with pytest.raises(ModelFileError, match="a directory"):
        GGUFFile.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUFFile.open(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUFFile.open("a\0b")


def test_an_empty_file(tmp_path):
    refuse(tmp_path, b"", "empty")


def small_model(path):
    """A valid file with some of everything."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(20)])
    writer.add_array("tokenizer.ggml.scores", [float(i) for i in range(20)])
    for name in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F32"):
        kind = gguf.GGMLQuantizationType[name]
        values = rng.standard_normal((2, 32)).astype(np.float32)
        writer.add_tensor(f"blk.0.{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def read_all(file):
    """Touch every byte that the file offers."""
    for value in file.metadata.values():
        if isinstance(value, (StringArray, np.ndarray)):
            list(value)
    for tensor in file.tensors.values():
        assert dequantize(tensor).shape == tensor.shape


def test_truncations(tmp_path):
    content = small_model(tmp_path / "whole.gguf")
    read_all(try_open(tmp_path, content))
    end = len(content)  # the last tensor fills its last 32 bytes
    rng = random.Random(5)
    lengths = [len(content) * share // 100 for share in (0, 25, 50, 75, 99)] + [end - 1]
    for length in lengths + [rng.randrange(end) for _ in range(300)]:
        with pytest.raises(YeoulError):
            try_open(tmp_path, content[:length])


def test_bit_flips(tmp_path):
    content = small_model(tmp_path / "whole.gguf")
    header_end = content.index(b"blk.0.F32.weight") + 48
    rng = random.Random(6)
    outcomes = set()
    tracemalloc.start()
    for i in range(300):
        broken = bytearray(content)
        broken[rng.randrange(header_end if i % 4 else len(content))] ^= 1 << rng.randrange(8)
        try:
            read_all(try_open(tmp_path, bytes(broken)))
            outcomes.add("read")
        except YeoulError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcomes == {"read", "refused"}
    assert peak < 16 << 20
