"""Converts tensors of the Open Inference Protocol v2, as JSON or bytes, to arrays and back.

In JSON, a tensor is {"name", "shape", "datatype", "data"}, with flat or nested numbers. In the binary tensor data extension, numbers
are little-endian bytes, row by row, after a JSON header of `Inference-Header-Content-Length` bytes. A text follows its length in four
bytes.
"""

import math
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
# The type of texts in signatures of ensembles.
TEXTS = "text"
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
# The most axes of a tensor, and the most numbers.
MOST_AXES, MOST_NUMBERS = 16, 1 << 31


def datatype_of(dtype: str | np.dtype) -> str:
    """Returns the protocol's name of a type. Types without a name are sent as FP32."""
    return TEXT if dtype == TEXTS else NAMES.get(np.dtype(getattr(ml_dtypes, str(dtype), dtype)), "FP32")


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Checks the shape of an input. Returns it as a tuple.

    Raises:
        BadInput: the shape is not a list of sizes, or has too many numbers.
    """
    if not isinstance(shape, list | tuple) or len(shape) > MOST_AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise BadInput(f"input `{name}`: shape is no list of sizes")
    # With a size of 0 there are no numbers, but numpy still refuses other sizes above its own limit.
    if math.prod(max(n, 1) for n in shape) > MOST_NUMBERS:
        raise BadInput(f"input `{name}`: shape {list(shape)} has too many numbers")
    return tuple(shape)


def from_json(name: str, shape: tuple[int, ...], datatype: str, data: Any) -> np.ndarray | list[str]:
    """Converts the JSON data of an input to an array, or to a list of texts.

    Raises:
        BadInput: the data have another size or type.
    """
    if datatype == TEXT:
        texts = _flat(name, data, shape)
        if not set(map(type, texts)) <= {str}:
            raise BadInput(f"input `{name}` is BYTES, and its data are no texts")
        return _texts(name, shape, texts)
    dtype = checked_datatype(name, datatype)
    flat = _flat(name, data, shape)
    kinds = {"b": {bool}, "i": {int}, "u": {int}}.get(dtype.kind, {int, float})
    if not set(map(type, flat)) <= kinds:
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
            array = np.asarray(flat, np.float64).astype(dtype)
    except OverflowError:
        array = np.full(1, np.inf)
    if not np.isfinite(array.astype(np.float64)).all():
        raise BadInput(f"input `{name}` has numbers outside {datatype}")
    return array.reshape(shape)


def from_bytes(name: str, shape: tuple[int, ...], datatype: str, data: bytes | memoryview) -> np.ndarray | list[str | bytes]:
    """Converts the bytes of an input to an array, which is a read-only view of the bytes, or to a list of texts.

    Raises:
        BadInput: the data have another size.
    """
    if datatype == TEXT:
        texts: list[str | bytes] = []
        at = 0
        while at + 4 <= len(data):
            (length,) = struct.unpack_from("<I", data, at)
            if at + 4 + length > len(data):
                raise BadInput(f"input `{name}`: a text goes beyond the data")
            texts.append(text_or_file(bytes(data[at + 4 : at + 4 + length])))
            at += 4 + length
        if at != len(data):
            raise BadInput(f"input `{name}`: {len(data) - at} bytes after the last text")
        return _texts(name, shape, texts)
    dtype = checked_datatype(name, datatype)
    count = math.prod(shape)
    if (size := count * dtype.itemsize) != len(data):
        raise BadInput(f"input `{name}`: shape {list(shape)} of {datatype} has {size} bytes, and {len(data)} were sent")
    return np.frombuffer(data, dtype).reshape(shape)


def text_or_file(data: bytes) -> str | bytes:
    """Decodes a value of a BYTES tensor to a text. Bytes that are not UTF-8, such as an image file, stay bytes, which steps that read
    texts refuse."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


def holds_texts(value: Any) -> bool:
    """Whether an output consists of texts: a list of str, or an array of texts."""
    return not isinstance(value, np.ndarray) or value.dtype.kind == "O"


def to_bytes(value: np.ndarray | Sequence[str]) -> tuple[str, list[int], bytes]:
    """Converts an output to its datatype, shape and bytes."""
    if holds_texts(value):
        raw = [text.encode("utf-8", "replace") for text in np.asarray(value, object).ravel()]
        return TEXT, list(np.shape(value)), b"".join(struct.pack("<I", len(text)) + text for text in raw)
    array = _sendable(np.asarray(value))
    return NAMES[array.dtype], list(array.shape), array.tobytes()


def to_json(value: np.ndarray | Sequence[str]) -> tuple[str, list[int], list[Any]]:
    """Converts an output to its datatype, shape and flat data.

    Raises:
        BadInput: the output contains NaN or an infinity, which JSON cannot express.
    """
    if holds_texts(value):
        return TEXT, list(np.shape(value)), np.asarray(value, object).ravel().tolist()
    array = _sendable(np.asarray(value))
    flat = array.ravel()
    if array.dtype.kind not in "biu":
        flat = flat.astype(np.float64 if array.dtype == np.float64 else np.float32)
        if not np.isfinite(flat).all():
            raise BadInput("an output is not finite, which JSON cannot say", hint="ask for it as binary data")
    return NAMES[array.dtype], list(array.shape), flat.tolist()


def _sendable(array: np.ndarray) -> np.ndarray:
    return array if array.dtype in NAMES else array.astype(np.float32)


def checked_datatype(name: str, datatype: str) -> np.dtype:
    """Returns the type of a datatype.

    Raises:
        BadInput: the protocol has no such type of numbers.
    """
    if datatype not in DATATYPES:
        raise BadInput(f"input `{name}`: unknown datatype `{datatype[:32]}`", hint=", ".join([*DATATYPES, TEXT]))
    return DATATYPES[datatype]


def _flat(name: str, data: Any, shape: tuple[int, ...]) -> list[Any]:
    """Flattens nested lists. If they are as deep as the shape, their sizes must be those of the shape."""
    if not isinstance(data, list):
        raise BadInput("`data` is no list")
    sizes = [len(data)]
    for _ in range(MOST_AXES):
        # Values of JSON have plain types, and a set of the types takes a fifth of the time of checking each value.
        if list not in (types := set(map(type, data))):
            if len(sizes) > 1 and len(sizes) == len(shape) and tuple(sizes) != shape:
                raise BadInput(f"input `{name}` has shape {list(shape)}, and its data {sizes}")
            return data
        if len(types) > 1:
            raise BadInput("`data` has lists beside values")
        if len(set(map(len, data))) > 1:
            raise BadInput(f"input `{name}` has lists of different lengths in its data")
        sizes.append(len(data[0]))
        data = [x for part in data for x in part]
    raise BadInput("`data` is nested too deeply")


def _texts(name: str, shape: tuple[int, ...], texts: list[Any]) -> list[Any]:
    _check_size(name, shape, len(texts))
    return texts


def _check_size(name: str, shape: tuple[int, ...], count: int) -> None:
    expected = math.prod(shape)
    if expected != count:
        raise BadInput(f"input `{name}`: shape {list(shape)} has {expected} values, and {count} were sent")


def read_tensors(inputs: Any, binary: memoryview) -> dict[str, Any]:
    """Reads the inputs of a request by name.

    Args:
        inputs: the request's list of inputs.
        binary: the bytes after the JSON header.

    Raises:
        BadInput: an input is malformed, two have the same name, or data does not fit its shape.
    """
    if not isinstance(inputs, list) or not all(isinstance(spec, dict) for spec in inputs):
        raise BadInput("`inputs` is no list of tensors")
    arrays: dict[str, Any] = {}
    at = 0
    for spec in inputs:
        name, datatype = spec.get("name"), spec.get("datatype")
        if not isinstance(name, str) or not isinstance(datatype, str):
            raise BadInput("an input has no `name` or no `datatype`")
        name = name[:128]
        if name in arrays:
            raise BadInput(f"two inputs have the name `{name}`")
        shape = checked_shape(name, spec.get("shape"))
        parameters = spec.get("parameters")
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, dict):
            raise BadInput(f"parameters of input `{name}` are no object")
        if "shared_memory_region" in parameters:
            raise BadInput(f"input `{name}` is in shared memory, which is not supported", hint="send it in the request")
        size = parameters.get("binary_data_size")
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(binary) - at:
                raise BadInput(f"input `{name}`: binary_data_size is {str(size)[:20]}, and {len(binary) - at} bytes are left")
            arrays[name] = from_bytes(name, shape, datatype, binary[at : at + size])
            at += size
        else:
            arrays[name] = from_json(name, shape, datatype, spec.get("data"))
    if at != len(binary):
        raise BadInput(f"{len(binary) - at} bytes after the last input")
    return arrays
