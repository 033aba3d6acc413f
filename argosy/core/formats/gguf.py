"""Reads GGUF files, the container of llama.cpp: metadata, the tables of a tokenizer, and tensors.

Nothing is allocated before its size was compared with the remaining bytes. So a hostile file raises `Damaged`, and needs only a small
multiple of its own length in memory. Versions 2 and 3, little-endian (ggml-org/ggml, docs/gguf.md). This module knows no families:
`core.keymap` maps names, and block formats are in `quants`.
"""

import math
import struct
from collections.abc import KeysView
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import Damaged, Unsupported
from argosy.core.formats import Shape, damaged_container, map_file, quote_name
from argosy.core.formats.quants import TYPES, Type, dequantize
from argosy.core.process.resident import drop

# The limit of ggml.
MOST_AXES = 4
MOST_NAME_BYTES = 65_535
# The limit of nested arrays.
MOST_DEPTH = 4
ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_LEAST_BYTES = {code: np.dtype(dtype).itemsize for code, dtype in _NUMBERS.items()} | {_BOOL: 1, _STRING: 8, _ARRAY: 12}
# Bytes of the shortest key with its value, and of the shortest description of a tensor.
_LEAST_PAIR, _LEAST_TENSOR = 13, 24


class GGUFTensor(NamedTuple):
    """The description of a stored tensor.

    kind: the type in which it is stored.
    shape: the shape in numpy's order, so the reverse of the file's.
    begin: the offset of the first byte in the file.
    bytes: the size in the file.
    """

    kind: Type
    shape: Shape
    begin: int
    bytes: int


@dataclass(frozen=True)
class GGUF:
    """An open GGUF file, and a `TensorReader` of its tensors.

    meta: the metadata by key.
    places: the descriptions of the tensors by name.
    data: the mapped bytes of the whole file, uint8.
    """

    path: Path
    version: int
    meta: dict[str, Any]
    places: dict[str, GGUFTensor]
    data: np.ndarray

    @staticmethod
    def open(path: str | Path) -> "GGUF":
        """Reads the metadata, and checks the position of every tensor. In metadata, arrays of numbers become numpy arrays, and others
        lists.

        Raises:
            BadInput: there is no such file, or it cannot be read.
            Damaged: the contents contradict each other or the length of the file.
            Unsupported: the file has another version, is big-endian or one part of a split model, or has a type of unknown size.
        """
        path = Path(path)
        data = map_file(path)
        cursor = _Cursor(data.data, path)
        version, tensors, pairs = _preamble(cursor)
        meta = _metadata(cursor, pairs)
        parts = meta.get("split.count", 1)
        if type(parts) is not int or parts not in (0, 1):
            raise Unsupported("one part of a split GGUF", where=f"in {path}", hint="join it: llama-gguf-split --merge")
        alignment = meta.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise damaged_container(path, "`general.alignment` is not a power of two")
        return GGUF(path, version, meta, _places(cursor, tensors, alignment), data)

    @property
    def names(self) -> KeysView[str]:
        return self.places.keys()

    def shape(self, name: str) -> Shape:
        return self.places[name].shape

    def type(self, name: str) -> str:
        """ggml's name of the storage type: F32, BF16, Q4_K ..."""
        return self.places[name].kind.name

    def dtype(self, name: str) -> np.dtype:
        """The type that `read` returns."""
        return self.places[name].kind.dtype or np.dtype(np.float32)

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor, uint8. The last axis of the tensor becomes bytes, and the others are unchanged."""
        place = self.places[name]
        values, size = place.kind.values, place.kind.bytes
        *rows, last = place.shape or (1,)
        return self.data[place.begin : place.begin + place.bytes].reshape(*rows, last // values * size)

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor. The result is a view of the file if the stored bytes are plain numbers, otherwise dequantized to float32.
        After dequantizing, the pages of the file are dropped from memory, which otherwise any view would keep there.

        Raises:
            Unsupported: the block type cannot be decoded.
        """
        place = self.places[name]
        if place.kind.dtype is None:
            raw = self.raw(name)
            values = dequantize(place.kind.name, raw).reshape(place.shape)
            drop(raw.ctypes.data, raw.nbytes)
            return values
        view = self.data[place.begin : place.begin + place.bytes].view(place.kind.dtype)
        return np.require(view.reshape(place.shape), requirements="A")

    def read_part(self, name: str, i: int) -> np.ndarray:
        """Reads the `i`-th entry along the first axis of a tensor with several axes. Only that entry is dequantized."""
        if (kind := self.places[name].kind).dtype is None:
            raw = self.raw(name)[i]
            values = dequantize(kind.name, raw)
            drop(raw.ctypes.data, raw.nbytes)
            return values
        return self.read(name)[i]


class _Cursor:
    """Reads forward from a position in the file, never beyond the end."""

    def __init__(self, data: memoryview, path: Path):
        self.data, self.path, self.at = data, path, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> memoryview:
        if count > self.left:
            raise self.wrong(f"{plural(count, 'byte')} needed at byte {self.at}, {self.left} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def count(self, noun: str, least_bytes: int) -> int:
        """Reads a number of items, and checks that so many items of at least `least_bytes` bytes each fit into the remaining bytes."""
        count = self.u64()
        if count * least_bytes > self.left:
            raise self.wrong(f"{count} {noun} do not fit into the {self.left} bytes left")
        return count

    def text(self, most: int | None = None) -> str:
        length = self.count("bytes of text", 1)
        if most is not None and length > most:
            raise self.wrong(f"a name of {length} bytes, over the limit of {most}")
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError:
            raise self.wrong(f"text before byte {self.at} is not UTF-8") from None

    def wrong(self, problem: str) -> Damaged:
        return damaged_container(self.path, problem)


def _preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Reads the version, the number of tensors and the number of keys."""
    if cursor.take(4) != b"GGUF":
        raise cursor.wrong("it does not begin with `GGUF`")
    version = cursor.u32()
    if version not in (2, 3):
        big = version in (2 << 24, 3 << 24)
        raise Unsupported(f"GGUF {'big endian' if big else f'version {version}'}", where=f"in {cursor.path}")
    tensors = cursor.count("tensors", _LEAST_TENSOR)
    return version, tensors, cursor.count("keys", _LEAST_PAIR)


def _metadata(cursor: _Cursor, pairs: int) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text(MOST_NAME_BYTES)
        if key in meta:
            raise cursor.wrong(f"key {quote_name(key)} appears twice")
        try:
            meta[key] = _value(cursor, cursor.u32())
        except Damaged as error:
            raise Damaged(f"{error.what}, key {quote_name(key)}", where=error.where, hint=error.hint) from None
    return meta


def _value(cursor: _Cursor, code: int) -> Any:
    if code in _NUMBERS:
        return np.frombuffer(cursor.take(_LEAST_BYTES[code]), _NUMBERS[code])[0].item()
    if code == _BOOL:
        return bool(_switches(cursor, 1)[0])
    if code == _STRING:
        return cursor.text()
    if code == _ARRAY:
        return _array(cursor, 1)
    raise cursor.wrong(f"unknown type {code} of a value")


def _array(cursor: _Cursor, depth: int) -> Any:
    """Reads an array. Numbers become a numpy array, and other values a list."""
    if depth > MOST_DEPTH:
        raise cursor.wrong(f"arrays nested over {MOST_DEPTH} deep")
    code = cursor.u32()
    if code not in _LEAST_BYTES:
        raise cursor.wrong(f"unknown type {code} of an array")
    count = cursor.count("values of an array", _LEAST_BYTES[code])
    if code in _NUMBERS:
        return np.frombuffer(cursor.take(count * _LEAST_BYTES[code]), _NUMBERS[code]).copy()
    if code == _BOOL:
        return _switches(cursor, count)
    if code == _STRING:
        return [cursor.text() for _ in range(count)]
    return [_array(cursor, depth + 1) for _ in range(count)]


def _switches(cursor: _Cursor, count: int) -> np.ndarray:
    values = np.frombuffer(cursor.take(count), np.uint8)
    if (values > 1).any():
        raise cursor.wrong("a switch that is neither 0 nor 1")
    return values.astype(bool)


def _places(cursor: _Cursor, tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    """Reads the descriptions of the tensors. Their data begins at the next multiple of the alignment."""
    places: dict[str, GGUFTensor] = {}
    for _ in range(tensors):
        name = cursor.text(MOST_NAME_BYTES)
        if name in places:
            raise cursor.wrong(f"tensor {quote_name(name)} appears twice")
        places[name] = _place(cursor, name, alignment)
    start = -(-cursor.at // alignment) * alignment
    places = {name: place._replace(begin=start + place.begin) for name, place in places.items()}
    _check_apart(places, cursor)
    return places


def _place(cursor: _Cursor, name: str, alignment: int) -> GGUFTensor:
    def wrong(problem: str) -> Damaged:
        return cursor.wrong(f"tensor {quote_name(name)}: {problem}")

    axes = cursor.u32()
    if axes > MOST_AXES:
        raise wrong(f"{axes} axes, over the limit of {MOST_AXES}")
    # ggml writes the innermost axis first.
    shape = tuple(cursor.u64() for _ in range(axes))[::-1]
    code, begin = cursor.u32(), cursor.u64()
    if code not in TYPES:
        raise Unsupported(f"tensor {quote_name(name)} is of the unknown GGUF type {code}", where=f"in {cursor.path}")
    kind = TYPES[code]
    if (shape[-1] if shape else 1) % kind.values:
        raise wrong(f"rows of {shape[-1] if shape else 1} are not a whole number of {kind.name} blocks of {kind.values}")
    if math.prod(n for n in shape if n) >= 2**59:
        raise wrong("its shape overflows")
    if begin % alignment:
        raise wrong(f"its offset {begin} is not a multiple of {alignment}")
    return GGUFTensor(kind, shape, begin, math.prod(shape) // kind.values * kind.bytes)


def _check_apart(places: dict[str, GGUFTensor], cursor: _Cursor) -> None:
    """Checks that every tensor is inside the file, and that no two share a byte."""
    at = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].bytes)):
        if place.begin < at:
            raise cursor.wrong(f"tensor {quote_name(name)} overlaps the one before")
        at = place.begin + place.bytes
        if at > len(cursor.data):
            raise cursor.wrong(f"tensor {quote_name(name)} ends at byte {at} of {len(cursor.data)}: the file is cut short")
