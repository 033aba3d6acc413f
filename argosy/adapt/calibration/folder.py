"""The folder of a running calibration, with the quantized layers so far and the inputs of the next layer.

    identity.json            the model, the data and the method
    inputs.3                 the inputs of layer 3, float32 [samples T D]: the outputs of the quantized layers before it
    layer.2.safetensors      the quantized weights of layer 2, and their errors on the data

Inputs are on disk, because they are larger than a layer of a large model. The system caches as much as fits into memory. A layer is
finished once its file exists, so after a kill calibration continues with the first layer without a file.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.formats import TensorEntry
from argosy.core.formats.files import check_space, of_text, write_all, write_file
from argosy.core.formats.safetensors import SafeTensors, tensors_file

IDENTITY = "identity.json"
Row = dict[str, Any]


class CalibrationFolder:
    """The folder of a calibration. It is created on first use, and the caller removes it.

    Args:
        path: a folder that does not exist, or that a process with the same identity left.
        identity: everything that affects the results, as a JSON object.
        shape: the shape of a layer's inputs, (samples, T, D).

    Raises:
        BadInput: the folder belongs to another calibration, or the disk is too small.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], shape: tuple[int, int, int]):
        self.path, self.shape = path, shape
        current = json.loads(json.dumps(identity))
        if not (path / IDENTITY).is_file():
            if path.exists() and any(path.iterdir()):
                raise BadInput(f"{path} is in the way", hint="move it: calibration keeps its layers there")
            check_space(path.parent, 2 * int(np.prod(shape, dtype=np.int64)) * 4)
            write_file(path / IDENTITY, of_text(IDENTITY, json.dumps(current)))
            return
        before = json.loads((path / IDENTITY).read_text())
        differ = [f"{k} was {before.get(k)}, is {current.get(k)}" for k in before | current if before.get(k) != current.get(k)]
        if differ:
            hint = "finish that with the same command, remove the folder, or name another target"
            raise BadInput(f"{path} is an unfinished calibration of another kind", where="; ".join(differ), hint=hint)

    @property
    def layers(self) -> int:
        """The number of finished layers."""
        count = 0
        while self._file(count).is_file():
            count += 1
        return count

    def read_inputs(self, i: int, rows: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Reads the inputs of a layer. Yields (slice of samples, inputs [rows T D]) for `rows` samples at a time."""
        each = int(np.prod(self.shape[1:]))
        with self._inputs(i).open("rb") as file:
            for start in range(0, self.shape[0], rows):
                place = slice(start, min(start + rows, self.shape[0]))
                x = np.fromfile(file, np.float32, (place.stop - start) * each)
                yield place, x.reshape(-1, *self.shape[1:])

    def write_inputs(self, i: int, parts: Iterator[np.ndarray]) -> None:
        """Writes the inputs of a layer, completely or not at all."""
        pending = self.path / f".inputs.{i}.tmp"
        with pending.open("wb", buffering=0) as out:
            for part in parts:
                write_all(out, np.ascontiguousarray(part, np.float32).reshape(-1).view(np.uint8))
            os.fsync(out.fileno())
        pending.rename(self._inputs(i))

    def has_inputs(self, i: int) -> bool:
        return self._inputs(i).is_file()

    def write_layer(self, i: int, arrays: Mapping[str, np.ndarray], rows: list[Row]) -> None:
        """Writes the quantized weights of a layer, and removes its inputs.

        Args:
            arrays: the arrays of the quantized weights, by name.
            rows: the results of each weight on the data, as JSON objects.
        """
        entries = [TensorEntry(name, a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()]
        write_file(self._file(i), tensors_file(self._file(i).name, entries, {"rows": json.dumps(rows)}))
        self._inputs(i).unlink(missing_ok=True)

    def read_layer(self, i: int) -> tuple[SafeTensors, list[Row]]:
        """Reads the quantized weights of a layer, and their results on the data."""
        file = SafeTensors.open(self._file(i))
        return file, json.loads(file.metadata["rows"])

    def _inputs(self, i: int) -> Path:
        return self.path / f"inputs.{i}"

    def _file(self, i: int) -> Path:
        return self.path / f"layer.{i}.safetensors"
