"""Weights one tensor at a time: what keeps a conversion's memory near the size of its largest tensor.

Notable: pages of a mapped file count as memory of the process until they are given back, so they are, tensor by tensor.
A checkpoint that keeps layers in stacks is read a stack at a time: its largest stack is then the largest tensor. Experts
that are tensors of their own pass one by one: [256 7168 2048] of DeepSeek-V3 is 7.5 GB, an expert 29 MB.
TensorStore reads single arrays of a checkpoint; Orbax reads all of them or none.
"""

import json
import mmap
from collections.abc import Iterator, KeysView
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from argosy.checkpoint.hub import Mapped
from argosy.checkpoint.store import WEIGHTS
from argosy.checkpoint.stored import StepReader, Stored
from argosy.core.errors import Damaged
from argosy.core.formats import Over, Reader, Shape, is_apart, read_part
from argosy.core.formats.zarr import map_array

POPULATE_READ = 22  # Linux 5.14: a range at once and in order; 2.4 GB/s from a cold disk, where faults give 1.5
AHEAD_BYTES = 1 << 27
SMALL_BYTES = 1 << 16


def streamed(stored: Stored) -> Stored:
    """The same model, whose weights leave no more than the last tensor in memory."""
    weights = stored.weights
    if isinstance(weights, StepReader):
        return replace(stored, weights=StepArrays(weights))
    if isinstance(weights, Mapped):
        return replace(stored, weights=weights.over(Unmapped(weights.reader)))
    return stored


def largest(stored: Stored) -> tuple[str, int]:
    """The largest tensor of the source, and its bytes. Ours count too, as far as they are read at once: blocks with scales
    become float32, and experts are read one by one."""
    weights = stored.weights
    sizes = []
    if isinstance(weights, Mapped):
        sizes += [(name, size(weights.reader.shape(name), weights.reader.dtype(name))) for name in weights.reader.names]
    if isinstance(weights, StepArrays):
        sizes += weights.stored_sizes()
    sizes += [(name, _read_bytes(weights, name)) for name in weights.names]
    return max(sizes, key=lambda item: item[1])  # of equals the first, which has the source's own name


def _read_bytes(weights: Reader, name: str) -> int:
    shape = weights.shape(name)
    return size(shape[1:] if is_apart(weights, name) else shape, weights.dtype(name))


def size(shape: Shape, dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def in_order(array: np.ndarray) -> np.ndarray:
    """The array in C order, free of what it was cut from: a view would keep a whole tensor in memory until it is written.

    XLA transposes ten times as fast as numpy: 2.7 GB/s against 0.27 for bfloat16 [11008, 4096].
    """
    if array.flags.c_contiguous:
        return array if _map_of(array) is not None else array.copy()
    if array.nbytes < SMALL_BYTES or array.dtype.itemsize > 4:  # jax keeps no 64-bit numbers unless told
        return np.ascontiguousarray(array)
    plain = array.view(f"u{array.dtype.itemsize}")
    return np.asarray(jax.device_put(plain, jax.local_devices(backend="cpu")[0])).view(array.dtype)


class Unmapped(Over):
    """Tensors of mapped files; reading one gives back the pages of those before."""

    def __init__(self, reader: Reader):
        super().__init__(reader)
        self._pages = _Pages()

    def read(self, name: str) -> np.ndarray:
        self._pages.give_back()
        return self._pages.hold(self.reader.read(name))

    def read_part(self, name: str, i: int) -> np.ndarray:
        self._pages.give_back()
        return self._pages.hold(read_part(self.reader, name, i))


class _Pages:
    """Those of the mapped file that was read last."""

    def __init__(self) -> None:
        self.last: mmap.mmap | None = None

    def give_back(self) -> None:
        if self.last is not None:
            self.last.madvise(mmap.MADV_DONTNEED)  # a view that is still in use reads them again

    def hold(self, array: np.ndarray) -> np.ndarray:
        self.last = _map_of(array) or self.last
        if self.last is not None and array.nbytes > SMALL_BYTES:
            _populate(self.last, array)
        return array


def _map_of(array: Any) -> mmap.mmap | None:
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    return array


def _populate(pages: mmap.mmap, array: np.ndarray) -> None:
    """Reads a tensor's pages where the system can, and has it begin with those after them."""
    begin = array.ctypes.data - np.frombuffer(pages, np.uint8).ctypes.data
    if not 0 <= begin < len(pages):
        return  # a copy
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    end = min(begin + array.nbytes, len(pages))
    after = end // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        if after < len(pages):
            pages.madvise(mmap.MADV_WILLNEED, after, min(AHEAD_BYTES, len(pages) - after))
        pages.madvise(POPULATE_READ, first, end - first)
    except OSError:
        pass  # an older system: pages come as they are touched


class StepArrays:
    """A checkpoint's weights by per-layer name, whatever layout it was written in; one stored array in memory."""

    def __init__(self, step: StepReader):
        self.step, self._pages = step, _Pages()
        self._last: tuple[str, np.ndarray] | None = None

    @property
    def names(self) -> KeysView[str]:
        return self.step.names

    def shape(self, name: str) -> Shape:
        return self.step.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return self.step.dtype(name)

    def read(self, name: str) -> np.ndarray:
        return self._read(name)

    def read_part(self, name: str, i: int) -> np.ndarray:
        return self._read(name, i)

    def _read(self, name: str, *part: int) -> np.ndarray:
        address, layer = self.step._where[name]
        at = part if layer is None else (layer, *part)
        self._pages.give_back()
        if self._last is None or self._last[0] != address:
            self._last = None  # let go before the next is read
            self._last = address, read_array(self.step.folder, address)
        array = self._last[1]
        if not at:
            return self._pages.hold(array)
        return self._pages.hold(array[at]) if _map_of(array) is not None else array[at].copy()  # a view keeps the stack

    def stored_sizes(self) -> Iterator[tuple[str, int]]:
        for address, stored in self.step._shapes.items():
            yield address, size(tuple(stored.shape), np.dtype(stored.dtype))


def read_array(folder: Path, name: str, item: str = WEIGHTS) -> np.ndarray:
    """One array of a checkpoint: mapped where it was converted, read where Orbax packed it.

    Raises:
        Damaged: it cannot be read.
    """
    if (mapped := map_array(folder / item / name)) is not None:
        return mapped
    import tensorstore

    item_folder = (folder / item).absolute()
    try:
        packed = json.loads((item_folder / "_METADATA").read_text())["use_ocdbt"]
        files = {"driver": "file", "path": f"{item_folder}/" if packed else f"{item_folder}/{name}/"}
        store = {"driver": "ocdbt", "base": files, "path": f"{name}/"} if packed else files
        array = tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True, read=True).result()
        return np.asarray(array.read().result())
    except Exception as failure:
        raise Damaged(f"`{name}` cannot be read: {str(failure).splitlines()[0][:160]}", where=str(folder)) from failure
