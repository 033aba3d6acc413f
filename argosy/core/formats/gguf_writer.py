"""Writes GGUF files: metadata, descriptions of the tensors, and their blocks, encoded slab by slab.

The size of a file is known beforehand. One tensor at a time is in memory, in its own type. One slab of it at a time becomes float32,
and then blocks. Version 3, little-endian (ggml-org/ggml, docs/gguf.md).
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.formats import Shape, TensorEntry
from argosy.core.formats.encoders import ENCODERS, encode
from argosy.core.formats.files import SLAB_BYTES, File, Order, pieces
from argosy.core.formats.gguf import ALIGNMENT, MOST_AXES
from argosy.core.formats.quants import BY_NAME, TYPES, Type, dequantize

VERSION = 3
_CODES = {kind.name: code for code, kind in TYPES.items()}
_STRING, _ARRAY, _BOOL = 8, 9, 7
# By numpy's name of a type.
_NUMBERS = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip


@dataclass(frozen=True)
class RoundingError:
    """The rounding error of a tensor.

    size: the sum of the squares of its numbers.
    change: the sum of the squares of their changes by rounding.
    """

    size: float = 0.0
    change: float = 0.0

    @property
    def relative(self) -> float:
        """The root mean square of the changes, divided by that of the numbers."""
        return math.sqrt(self.change / self.size) if self.size else 0.0


@dataclass
class EncodedTensor:
    """A tensor to be written, and the type in which it is stored.

    entry: the tensor.
    type: ggml's name of the type.
    errors: the rounding error, once the tensor is written.
    """

    entry: TensorEntry
    type: str
    errors: RoundingError = field(default_factory=RoundingError)

    @property
    def kind(self) -> Type:
        return BY_NAME[self.type]

    @property
    def bytes(self) -> int:
        return math.prod(self.entry.shape) // self.kind.values * self.kind.bytes

    def slabs(self, order: Order) -> Iterator[np.ndarray]:
        """Yields the encoded tensor as uint8 slabs, and then sets `errors`.

        Raises:
            BadInput: a number is not finite, or too large for the type.
        """
        errors = RoundingError()
        parts = [self.entry.make()] if self.entry.parts is None else self.entry.parts()
        for part in parts:
            for piece in pieces(np.asarray(part), SLAB_BYTES):
                w = order(piece)
                raw = self._encoded(w)
                errors = self._add(errors, np.asarray(w, np.float32), raw)
                yield raw.reshape(-1)
        self.errors = errors

    def _encoded(self, w: np.ndarray) -> np.ndarray:
        if self.type in ENCODERS:
            return encode(self.type, w)
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(w.astype(self.kind.dtype, copy=False)).reshape(-1).view(np.uint8)

    def _add(self, errors: RoundingError, w: np.ndarray, raw: np.ndarray) -> RoundingError:
        kind = self.kind.dtype
        stored = dequantize(self.type, raw) if kind is None else raw.view(kind).astype(np.float32)
        # NaN or an infinity on either side makes this sum NaN or infinite.
        with np.errstate(invalid="ignore"):
            change = float(np.square(stored.reshape(w.shape) - w, dtype=np.float64).sum())
        if not math.isfinite(change):
            problem = "has numbers that are not finite" if not np.isfinite(w).all() else f"has numbers that are beyond {self.type}"
            raise BadInput(f"`{self.entry.name}` {problem}", hint="the source is damaged, or needs a wider type: nothing was written")
        return RoundingError(errors.size + float(np.square(w, dtype=np.float64).sum()), errors.change + change)


def gguf_file(name: str, meta: Mapping[str, Any], tensors: Sequence[EncodedTensor]) -> File:
    """Describes a GGUF file to be written.

    Args:
        name: the name of the file.
        meta: the metadata: texts, bools, ints (written as uint32), floats (written as float32), numpy numbers and arrays, and lists of
            texts.
        tensors: the tensors.

    Raises:
        ValueError: a value has another type, a row is not a whole number of blocks, or a tensor has too many axes.
    """
    head = b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(meta))
    head += b"".join(_text(key) + _value(value) for key, value in meta.items())
    at, tensor_infos = 0, []
    for tensor in tensors:
        tensor_infos.append(_tensor_info(tensor, at))
        at += _aligned(tensor.bytes)
    head += b"".join(tensor_infos)
    head += bytes(_aligned(len(head)) - len(head))

    def slabs(order: Order) -> Iterator[np.ndarray]:
        yield np.frombuffer(head, np.uint8)
        for tensor in tensors:
            yield from tensor.slabs(order)
            if rest := _aligned(tensor.bytes) - tensor.bytes:
                yield np.zeros(rest, np.uint8)

    return File(name, len(head) + at, slabs)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _tensor_info(tensor: EncodedTensor, at: int) -> bytes:
    """The encoded description of a tensor whose data begins at offset `at`. ggml writes the innermost axis first."""
    shape: Shape = tensor.entry.shape
    if len(shape) > MOST_AXES or shape[-1] % tensor.kind.values:
        raise ValueError(f"`{tensor.entry.name}`: {list(shape)} cannot be stored as {tensor.type}")
    head = _text(tensor.entry.name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
    return head + struct.pack("<IQ", _CODES[tensor.type], at)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """The encoded value, after the number of its type."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        value = np.uint32(value)
    elif isinstance(value, float):
        value = np.float32(value)
    if isinstance(value, np.generic):
        return struct.pack("<I", _NUMBERS[value.dtype.name]) + value.tobytes()
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", _ARRAY, _NUMBERS[value.dtype.name], value.size) + value.tobytes()
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    raise ValueError(f"{type(value).__name__} cannot be stored in a GGUF file")
