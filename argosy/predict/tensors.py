"""Tensors of the Open Inference Protocol v2, as JSON and as bytes, and arrays.

JSON: {"name", "shape", "datatype", "data"}, the numbers flat or nested. Bytes: little-endian and row by row, after a JSON header whose
length `Inference-Header-Content-Length` gives; a text has its length in four bytes before it (the binary tensor data extension).
"""

import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from argosy.core.errors import BadInput

DATATYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(bool),
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
TEXT = "BYTES"
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
# Axes of a tensor, and numbers of one.
MOST_AXES, MOST_NUMBERS = 16, 1 << 31


def datatype_of(dtype: str | np.dtype) -> str:
    """The protocol's name of a type; BYTES for types that it has none for, whose numbers are sent as FP32."""
    return NAMES.get(np.dtype(getattr(ml_dtypes, str(dtype), dtype)), "FP32")


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """A shape of a request.

    Raises:
        BadInput: it is no list of sizes.
    """
    if not isinstance(shape, list | tuple) or len(shape) > MOST_AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise BadInput(f"input `{name}`: shape is no list of sizes")
    if np.prod([float(n) for n in shape] or [1.0]) > MOST_NUMBERS:
        raise BadInput(f"input `{name}`: shape {list(shape)} has too many numbers")
    return tuple(shape)


def from_json(name: str, shape: tuple[int, ...], datatype: str, data: Any) -> np.ndarray | list[str]:
    """An input whose data is JSON; texts as a list of str.

    Raises:
        BadInput: the data has another size or type.
    """
    if datatype == TEXT:
        texts = _flat(data)
        if not all(isinstance(text, str) for text in texts):
            raise BadInput(f"input `{name}` is BYTES, and its data are no texts")
        return _texts(name, shape, texts)
    dtype = _dtype(name, datatype)
    flat = _flat(data)
    kinds: Any = {"b": bool, "i": int, "u": int}.get(dtype.kind, (int, float))
    if not all(isinstance(x, kinds) and (isinstance(x, bool) == (dtype.kind == "b")) for x in flat):
        raise BadInput(f"input `{name}` is {datatype}, and its data has values of another type")
    _check_size(name, shape, len(flat))
    if dtype.kind in "iu" and flat:
        limits = np.iinfo(dtype)
        if min(flat) < limits.min or max(flat) > limits.max:
            raise BadInput(f"input `{name}` has numbers outside {datatype}")
    if dtype.kind in "biu":
        return np.asarray(flat, dtype).reshape(shape)
    try:
        with np.errstate(over="ignore"):
            found = np.asarray(flat, np.float64).astype(dtype)
    except OverflowError:
        found = np.full(1, np.inf)
    if not np.isfinite(found.astype(np.float64)).all():
        raise BadInput(f"input `{name}` has numbers outside {datatype}")
    return found.reshape(shape)


def from_bytes(name: str, shape: tuple[int, ...], datatype: str, data: bytes | memoryview) -> np.ndarray | list[str]:
    """An input whose data is bytes. Arrays are read-only views of them.

    Raises:
        BadInput: the data has another size, or is no UTF-8.
    """
    if datatype == TEXT:
        texts, at = [], 0
        while at + 4 <= len(data):
            (length,) = struct.unpack_from("<I", data, at)
            if at + 4 + length > len(data):
                raise BadInput(f"input `{name}`: a text goes beyond the data")
            try:
                texts.append(str(bytes(data[at + 4 : at + 4 + length]), "utf-8"))
            except UnicodeDecodeError:
                raise BadInput(f"input `{name}`: a text is no UTF-8") from None
            at += 4 + length
        if at != len(data):
            raise BadInput(f"input `{name}`: {len(data) - at} bytes after the last text")
        return _texts(name, shape, texts)
    dtype = _dtype(name, datatype)
    count = int(np.prod(shape, dtype=np.int64))
    if (size := count * dtype.itemsize) != len(data):
        raise BadInput(f"input `{name}`: shape {list(shape)} of {datatype} has {size} bytes, and {len(data)} were sent")
    return np.frombuffer(data, dtype).reshape(shape)


def to_bytes(value: np.ndarray | Sequence[str]) -> tuple[str, list[int], bytes]:
    """An output as datatype, shape and bytes."""
    if not isinstance(value, np.ndarray):
        raw = [text.encode("utf-8", "replace") for text in value]
        return TEXT, [len(raw)], b"".join(struct.pack("<I", len(text)) + text for text in raw)
    array = _sendable(value)
    return NAMES[array.dtype], list(array.shape), array.tobytes()


def to_json(value: np.ndarray | Sequence[str]) -> tuple[str, list[int], list[Any]]:
    """An output as datatype, shape and flat data. JSON has no number for NaN and infinities.

    Raises:
        BadInput: there is one.
    """
    if not isinstance(value, np.ndarray):
        return TEXT, [len(value)], list(value)
    array = _sendable(value)
    flat = array.ravel()
    if array.dtype.kind not in "biu":
        flat = flat.astype(np.float64 if array.dtype == np.float64 else np.float32)
        if not np.isfinite(flat).all():
            raise BadInput("an output is not finite, which JSON cannot say", hint="ask for it as binary data")
    return NAMES[array.dtype], list(array.shape), flat.tolist()


def _sendable(array: np.ndarray) -> np.ndarray:
    return array if array.dtype in NAMES else array.astype(np.float32)


def _dtype(name: str, datatype: str) -> np.dtype:
    if datatype not in DATATYPES:
        raise BadInput(f"input `{name}`: unknown datatype `{datatype[:32]}`", hint=", ".join([*DATATYPES, TEXT]))
    return DATATYPES[datatype]


def _flat(data: Any) -> list[Any]:
    """Nested lists as one. The depth is bounded by that of a shape."""
    if not isinstance(data, list):
        raise BadInput("`data` is no list")
    for _ in range(MOST_AXES):
        if not any(isinstance(x, list) for x in data):
            return data
        if not all(isinstance(x, list) for x in data):
            raise BadInput("`data` has lists beside values")
        data = [x for part in data for x in part]
    raise BadInput("`data` is nested too deeply")


def _texts(name: str, shape: tuple[int, ...], texts: list[str]) -> list[str]:
    _check_size(name, shape, len(texts))
    return texts


def _check_size(name: str, shape: tuple[int, ...], count: int) -> None:
    expected = int(np.prod(shape, dtype=np.int64))
    if expected != count:
        raise BadInput(f"input `{name}`: shape {list(shape)} has {expected} values, and {count} were sent")


def read_tensors(inputs: Any, binary: memoryview) -> dict[str, Any]:
    """The inputs of a request by name.

    Args:
        inputs: the request's list. binary: what follows the JSON header.

    Raises:
        BadInput: they are no inputs, two have one name, or their data does not fit them.
    """
    if not isinstance(inputs, list) or not all(isinstance(one, dict) for one in inputs):
        raise BadInput("`inputs` is no list of tensors")
    found: dict[str, Any] = {}
    at = 0
    for one in inputs:
        name, datatype = one.get("name"), one.get("datatype")
        if not isinstance(name, str) or not isinstance(datatype, str):
            raise BadInput("an input has no `name` or no `datatype`")
        name = name[:128]
        if name in found:
            raise BadInput(f"two inputs have the name `{name}`")
        shape = checked_shape(name, one.get("shape"))
        parameters = one.get("parameters") or {}
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(binary) - at:
                raise BadInput(f"input `{name}`: binary_data_size is {str(size)[:20]}, and {len(binary) - at} bytes are left")
            found[name] = from_bytes(name, shape, datatype, binary[at : at + size])
            at += size
        else:
            found[name] = from_json(name, shape, datatype, one.get("data"))
    if at != len(binary):
        raise BadInput(f"{len(binary) - at} bytes after the last input")
    return found
