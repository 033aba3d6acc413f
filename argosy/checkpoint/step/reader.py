"""Reads a checkpoint's weights by per-layer name, from unrolled or stacked layers, with one stored array in memory at a time.

The pages of a mapped file count as memory of the process until they are released, so they are released array by array.
"""

from collections.abc import Iterator, KeysView
from pathlib import Path

import numpy as np
from flax import nnx

from argosy.checkpoint.step.layout import WEIGHTS
from argosy.checkpoint.step.load import stored_shapes
from argosy.checkpoint.step.locks import ReadLock
from argosy.checkpoint.step.shards import read_on_host
from argosy.core.counts import plural
from argosy.core.errors import BadInput, Damaged
from argosy.core.formats import Shape
from argosy.core.formats.zarr import map_array
from argosy.models.parts.stack.addresses import stored_addresses
from argosy.weights.pages import MappedPages, map_of


class StepReader:
    """The weights of one checkpoint. Retention does not remove the checkpoint while this object exists.

    Args:
        folder: the folder of the checkpoint.
        model: the description of the model, with shapes in place of weights, in the layout of the checkpoint
            (`models.parts.stack.stored_as`).

    Raises:
        BadInput: the checkpoint no longer exists, or lacks weights of its model.
        Damaged: the checkpoint cannot be read.
    """

    def __init__(self, folder: Path, model: nnx.Module):
        try:
            self._lock = ReadLock(folder)
        except FileNotFoundError:
            raise BadInput(f"no checkpoint at {folder}") from None
        self.folder, self._pages = folder, MappedPages()
        self._where = stored_addresses(model)
        self._shapes = stored_shapes(folder)
        self._last: tuple[str, np.ndarray] | None = None
        absent = {address for address, _ in self._where.values()} - set(self._shapes)
        if absent:
            raise BadInput(f"the checkpoint lacks {plural(len(absent), 'weight')} of its model: {', '.join(sorted(absent)[:3])}")

    @property
    def names(self) -> KeysView[str]:
        """The names in the order in which they are stored. If weights are read in this order, each stack of layers is read once."""
        return self._where.keys()

    def shape(self, name: str) -> Shape:
        address, layer = self._where[name]
        shape = tuple(self._shapes[address].shape)
        return shape if layer is None else shape[1:]

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(self._shapes[self._where[name][0]].dtype)

    def read(self, name: str) -> np.ndarray:
        return self._read(name)

    def read_part(self, name: str, i: int) -> np.ndarray:
        return self._read(name, i)

    def _read(self, name: str, *part: int) -> np.ndarray:
        address, layer = self._where[name]
        at = part if layer is None else (layer, *part)
        self._pages.give_back()
        if self._last is None or self._last[0] != address:
            # The array is freed before the next one is read.
            self._last = None
            self._last = address, read_array(self.folder, address)
        array = self._last[1]
        if not at:
            return self._pages.hold(array)
        # A copy, because a view would keep the whole stack in memory.
        return self._pages.hold(array[at]) if map_of(array) is not None else array[at].copy()

    def stored_sizes(self) -> Iterator[tuple[str, int]]:
        """Yields (stored name, bytes) of each array. A stack of layers is one array."""
        for address, stored in self._shapes.items():
            yield address, int(np.prod(stored.shape, dtype=np.int64)) * np.dtype(stored.dtype).itemsize


def read_array(folder: Path, name: str, item: str = WEIGHTS) -> np.ndarray:
    """Reads one array of a checkpoint. An array of a single shard is memory-mapped.

    Raises:
        Damaged: the array cannot be read.
    """
    if (mapped := map_array(folder / item / name)) is not None:
        return mapped
    try:
        return read_on_host(folder, item, [name])[name]
    except Exception as failure:
        raise Damaged(f"`{name}` cannot be read: {str(failure).splitlines()[0][:160]}", where=str(folder)) from failure
