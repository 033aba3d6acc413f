"""Messages between the processes of a server: a JSON object, and arrays as bytes. Nothing is unpickled."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from argosy.export.manifest import dtype_of_name

HEAD_BYTES = 8


class ProcessMessage(NamedTuple):
    """A message.

    head: the JSON object.
    arrays: the arrays by name.
    """

    head: dict[str, Any]
    arrays: dict[str, np.ndarray]


def packed_message(head: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """Converts a message to bytes."""
    arrays = arrays or {}
    listed = [[name, str(a.dtype), list(a.shape)] for name, a in arrays.items()]
    text = json.dumps({"head": dict(head), "arrays": listed}).encode()
    return b"".join([len(text).to_bytes(HEAD_BYTES, "little"), text, *(a.tobytes() for a in arrays.values())])


def unpacked_message(data: bytes) -> ProcessMessage:
    """Parses the bytes of a message. Its arrays are views of the bytes."""
    at = HEAD_BYTES + int.from_bytes(data[:HEAD_BYTES], "little")
    content, arrays = json.loads(data[HEAD_BYTES:at]), {}
    for name, kind, shape in content["arrays"]:
        dtype = dtype_of_name(kind)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    return ProcessMessage(content["head"], arrays)
