"""GGUFFile: a GGUF file (version 2 or 3, little-endian), memory-mapped, with every number in it checked.

Owns the file format: what is a key, an array, a tensor, and where its bytes lie. Must not know what any key or tensor
means to a model. A file is hostile until proven otherwise: each count, length and offset is compared with the real
length of the file before anything is allocated or read.

The format is described in ggml's `docs/gguf.md`: header, key-value pairs, tensor records, then the aligned data.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, NoReturn, Self, overload

import numpy as np

from yeoul._native import scan_strings
from yeoul.errors import ModelError, ModelFileError, UnsupportedModelError
from yeoul.weights.ggml_types import TYPE_NAMES
from yeoul.weights.tensor import BLOCKS, Tensor, TensorType

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMS: Final = 4
MAX_KEY_BYTES: Final = 65535
MAX_NAME_BYTES: Final = 127
MAX_ENTRIES: Final = 65536
"""Most keys, and most tensors, of one file: forty times what the largest models have."""

STRING: Final = 8
ARRAY: Final = 9
SCALARS: Final[Mapping[int, struct.Struct]] = MappingProxyType(
    {number: struct.Struct("<" + code) for number, code in enumerate("BbHhIif?")}
    | {10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d")}
)
"""Value types other than string and array, by the format's number."""
BOOL: Final = 7

AGAIN: Final = "the file is damaged or incomplete: download it again (a catalogue model: `yeoul pull NAME`)"


class StringArray(Sequence[str]):
    """The strings of an array, decoded when asked for: a vocabulary of 150,000 tokens costs nothing to open.

    Items are UTF-8; bytes that are not become U+FFFD in `str`. `bytes_at` and `iter_bytes` give the exact bytes.
    """

    def __init__(self, data: np.ndarray, offsets: np.ndarray) -> None:
        """`data`: the whole file, uint8. Item i is data[offsets[i] + 8 : offsets[i + 1]]; uint64, len + 1."""
        self._data = data
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.bytes_at(index).decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return (item.decode("utf-8", "replace") for item in self.iter_bytes())

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"

    def bytes_at(self, index: int) -> bytes:
        """The exact bytes of one item. Raises IndexError outside the array."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of an array of {len(self)}")
        index %= len(self)
        return self._data[int(self._offsets[index]) + 8 : int(self._offsets[index + 1])].tobytes()

    def iter_bytes(self) -> Iterator[bytes]:
        """The exact bytes of each item, in order; several times faster than `bytes_at` in a loop."""
        first = int(self._offsets[0])
        ends = (self._offsets - self._offsets[0]).tolist()
        run = self._data[first : first + ends[-1]].tobytes()
        return (run[start + 8 : end] for start, end in itertools.pairwise(ends))


class GGUFFile:
    """An open GGUF file. Everything is checked in `open`; afterwards nothing fails.

    `metadata`: scalars as Python values, numeric arrays as read-only numpy views, string arrays as StringArray.
    `tensors`: in the order of the file. Both stay valid after `close`, which only drops this object's hold: the map
    lives as long as anything that was taken from it. The file must not be shortened while it is in use.
    """

    def __init__(
        self, path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Tensor], mapped: mmap.mmap
    ) -> None:
        self._mapped = mapped
        self.path = path
        self.size = len(mapped)
        """Bytes."""
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map a file and read its header.

        Raises ModelFileError for a file that is missing, unreadable, damaged or not GGUF, and UnsupportedModelError
        for a sound one that uses what Yeoul does not have (another version, byte order, tensor type; split files).
        """
        path = Path(path)
        mapped = _map(path)
        try:
            metadata, tensors = _parse(np.frombuffer(mapped, np.uint8))
        except ModelError as error:
            raise type(error)(f"{path}: {error.message}", hint=error.hint) from None
        return cls(path, MappingProxyType(metadata), MappingProxyType(tensors), mapped)

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises ModelFileError where the file has none."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise ModelFileError(f"{self.path}: it does not name its architecture", hint="use a model's GGUF file")
        return value

    def release(self) -> None:
        """Give the pages that were read back to the system. Nothing is lost: they come from the file when touched."""
        self._mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Let go of the map. What was taken from `metadata` and `tensors` stays valid."""
        self.metadata = MappingProxyType({})
        self.tensors = MappingProxyType({})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _map(path: Path) -> mmap.mmap:
    """The file's bytes, read-only."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise ModelFileError(f"{path}: {what}", hint="name a .gguf file")
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{path}: the file is empty", hint=AGAIN)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file", hint="check the path, or get a model with `yeoul pull`") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path, or a file that shrank
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"{path}: cannot be read: {reason}", hint="check the path and its permissions") from None


def _bad(message: str) -> NoReturn:
    raise ModelFileError(message, hint=AGAIN)


def check_span(offset: int, size: int, limit: int, what: str) -> None:
    """The one bound check: bytes offset .. offset + size lie below `limit`. Raises ModelFileError."""
    if offset < 0 or size < 0 or offset > limit or size > limit - offset:
        _bad(f"{what} ends past the end of the file ({limit} bytes)")


class _Cursor:
    """A position in the file that cannot leave it."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.view = data.data
        self.at = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def skip(self, size: int, what: str) -> int:
        """Move over `size` bytes; where they start."""
        check_span(self.at, size, len(self.data), what)
        start = self.at
        self.at += size
        return start

    def scalar(self, form: struct.Struct, what: str) -> int | float | bool:
        value: int | float | bool = form.unpack_from(self.view, self.skip(form.size, what))[0]
        return value

    def u32(self, what: str) -> int:
        return int(self.scalar(SCALARS[4], what))

    def u64(self, what: str) -> int:
        return int(self.scalar(SCALARS[10], what))

    def count(self, least_bytes: int, what: str) -> int:
        """A number of things that take at least `least_bytes` each, so that a wrong one fails before its loop."""
        count = self.u64(what)
        if count > self.left // least_bytes:
            _bad(f"{what} is {count}, more than the file can hold")
        return count

    def string(self, what: str) -> bytes:
        size = self.u64(f"the length of {what}")
        start = self.skip(size, what)
        return bytes(self.view[start : start + size])

    def name(self, most: int, what: str) -> str:
        """A key or a tensor's name: not empty, not too long, printable."""
        raw = self.string(what)
        if not 0 < len(raw) <= most:
            _bad(f"{what} is {len(raw)} bytes long; it must have 1 to {most}")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            _bad(f"{what} is not UTF-8")
        if not text.isprintable():
            _bad(f"{what} holds control characters: {text[:80]!r}")
        return text


def _parse(data: np.ndarray) -> tuple[dict[str, object], dict[str, Tensor]]:
    cursor = _Cursor(data)
    _check_magic(cursor)
    num_tensors = cursor.count(33, "the number of tensors")
    num_keys = cursor.count(14, "the number of keys")
    if max(num_tensors, num_keys) > MAX_ENTRIES:
        _bad(f"{num_tensors} tensors and {num_keys} keys; at most {MAX_ENTRIES} are read")
    metadata: dict[str, object] = {}
    for index in range(num_keys):
        _add_pair(cursor, metadata, index)
    _check_split(metadata)
    alignment = _alignment(metadata)
    records = [_record(cursor, index) for index in range(num_tensors)]
    start = -(-cursor.at // alignment) * alignment
    return metadata, _tensors(data, records, start, alignment)


def _check_magic(cursor: _Cursor) -> None:
    start = bytes(cursor.view[:24])
    if start[:4] != MAGIC:
        if start.startswith(b"version https://git-lfs"):
            raise ModelFileError("a Git LFS pointer, not the model itself", hint="fetch the file with `git lfs pull`")
        raise ModelFileError(f"not a GGUF file: it starts with {start[:4]!r}", hint="name a .gguf file")
    cursor.skip(4, "the magic number")
    version = cursor.u32("the version")
    if version in VERSIONS:
        return
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModelError("a big-endian GGUF file", hint="convert it to little-endian")
    raise UnsupportedModelError(f"GGUF version {version}; Yeoul reads 2 and 3", hint="convert the model again")


def _add_pair(cursor: _Cursor, metadata: dict[str, object], index: int) -> None:
    key = cursor.name(MAX_KEY_BYTES, f"the name of key {index}")
    what = f"the value of {key[:80]!r}"
    if key in metadata:
        _bad(f"the key {key[:80]!r} occurs twice")
    kind = cursor.u32(f"the type of {key[:80]!r}")
    if kind == STRING:
        metadata[key] = cursor.string(what).decode("utf-8", "replace")
    elif kind == ARRAY:
        metadata[key] = _array(cursor, what)
    elif kind in SCALARS:
        metadata[key] = _scalar(cursor, kind, what)
    else:
        _bad(f"{what} has the unknown type {kind}")


def _scalar(cursor: _Cursor, kind: int, what: str) -> int | float | bool:
    if kind == BOOL and cursor.left and cursor.data[cursor.at] > 1:
        _bad(f"{what} is a truth value that is neither 0 nor 1")
    return cursor.scalar(SCALARS[kind], what)


def _array(cursor: _Cursor, what: str) -> object:
    kind = cursor.u32(f"the element type of {what}")
    if kind == STRING:
        return _strings(cursor, what)
    if kind == ARRAY:
        raise UnsupportedModelError(f"{what} is an array of arrays", hint="convert the model again without it")
    if kind not in SCALARS:
        _bad(f"{what} is an array of the unknown type {kind}")
    form = SCALARS[kind]
    count = cursor.count(form.size, f"the length of {what}")
    start = cursor.skip(count * form.size, what)
    values = cursor.data[start : cursor.at]
    if kind == BOOL and count and values.max() > 1:
        _bad(f"{what} holds a truth value that is neither 0 nor 1")
    return values.view(np.dtype(form.format))


def _strings(cursor: _Cursor, what: str) -> StringArray:
    count = cursor.count(8, f"the length of {what}")
    try:
        offsets: np.ndarray = scan_strings(cursor.data, cursor.at, count)
    except IndexError as error:
        _bad(f"{what}: {error}")
    cursor.at = int(offsets[-1])
    return StringArray(cursor.data, offsets)


def _check_split(metadata: Mapping[str, object]) -> None:
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        hint = "merge the parts into one file first (llama.cpp: `llama-gguf-split --merge`)"
        raise UnsupportedModelError(f"one of {parts} parts of a split model", hint=hint)


def _alignment(metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int) or value < 8 or value & (value - 1):
        _bad(f"general.alignment must be a power of two from 8 on, not {value!r:.40}")
    return value


class _Record(NamedTuple):
    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    size: int


def _record(cursor: _Cursor, index: int) -> _Record:
    name = cursor.name(MAX_NAME_BYTES, f"the name of tensor {index}")
    what = f"tensor {name!r}"
    num_dims = cursor.u32(f"the dimensions of {what}")
    if not 1 <= num_dims <= MAX_DIMS:
        _bad(f"{what} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
    # The file counts dimensions from the fastest-running one; shapes here end with it.
    shape = tuple(cursor.u64(f"the shape of {what}") for _ in range(num_dims))[::-1]
    kind = _tensor_type(cursor.u32(f"the type of {what}"), what)
    block = BLOCKS[kind]
    if min(shape) < 1:
        _bad(f"{what} has an empty shape {shape}")
    if shape[-1] % block.values:
        _bad(f"{what} has {shape[-1]} columns, which {kind.name} blocks of {block.values} do not divide")
    size = math.prod(shape) // block.values * block.bytes
    return _Record(name, kind, shape, cursor.u64(f"the offset of {what}"), size)


def _tensor_type(number: int, what: str) -> TensorType:
    if number not in TYPE_NAMES:
        _bad(f"{what} has the unknown type {number}")
    name = TYPE_NAMES[number]
    if name not in TensorType.__members__:
        known = ", ".join(kind.name for kind in TensorType)
        raise UnsupportedModelError(f"{what} is {name}, which Yeoul cannot read", hint=f"use a file made of {known}")
    return TensorType(number)


def _tensors(data: np.ndarray, records: Sequence[_Record], start: int, alignment: int) -> dict[str, Tensor]:
    """The tensors, once their places are known to be apart, aligned and inside the file."""
    tensors: dict[str, Tensor] = {}
    for record in records:
        if record.name in tensors:
            _bad(f"tensor {record.name!r} occurs twice")
        if record.offset % alignment:
            _bad(f"tensor {record.name!r} is not aligned to {alignment} bytes")
        check_span(start + record.offset, record.size, len(data), f"tensor {record.name!r}")
        where = data[start + record.offset : start + record.offset + record.size]
        tensors[record.name] = Tensor(record.name, record.type, record.shape, where)
    # Overlap would let a small file stand for any amount of weights once they are unpacked.
    ordered = sorted(records, key=lambda record: record.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.size > after.offset:
            _bad(f"tensors {before.name!r} and {after.name!r} overlap")
    return tensors
