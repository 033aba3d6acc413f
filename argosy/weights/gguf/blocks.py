"""Finds the weights of a GGUF file whose quantized blocks can be used without decoding them.

A weight qualifies if it equals a tensor of the file up to a permutation of whole rows, because llama.cpp's blocks run along the summed
axis of a product. A `KeyMap` only moves numbers, so two probes decide. In the first, every number of the file's tensor is replaced by
its row number; the weight must then be constant along its summed axis. In the second, every number is replaced by its column number;
the weight must then read 0, 1, 2 ... along that axis. Permuted rotary rows, rows of fused tensors and experts qualify. Other weights
are decoded to floats.
"""

import math
import weakref
from collections.abc import KeysView, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from argosy.core.formats import Shape
from argosy.core.formats.gguf import GGUF
from argosy.core.formats.quants import BY_NAME, CODES, IntegerBlocks, blocks
from argosy.core.process.resident import drop
from argosy.ops.native.blocks import packed_blocks, packed_bytes
from argosy.ops.native.codes import PANEL
from argosy.ops.native.products import Panels
from argosy.weights.hub.reader import MappedTensors

# The number of rows that are compared at a time.
AT_ONCE = 256


@dataclass(frozen=True)
class BlockRows:
    """A weight as rows of a tensor that is stored in blocks.

    type: the GGUF type of the blocks, such as Q4_K.
    raw: the bytes of the tensor, [rows, bytes of a row].
    order: the row of the tensor for each column of the product. Experts follow each other.
    shape, inner, first, experts: the shape of the weight and the roles of its axes, as in `Panels`.
    """

    type: str
    raw: np.ndarray
    order: np.ndarray
    shape: Shape
    inner: int
    first: bool
    experts: int = 0

    def packed(self, like: Any = None) -> Panels:
        """Packs the weight for products on a CPU. The pages of the file that were read are released from memory.

        Args:
            like: the argument of `packed_blocks`.
        """

        def read(columns: slice) -> IntegerBlocks:
            return blocks(self.type, self.raw[self.order[columns]])

        layout = {"shape": self.shape, "inner": self.inner, "first": self.first, "experts": self.experts}
        if self.experts:
            # One matrix, in whose panels experts follow each other: an expert's columns are whole panels.
            columns = len(self.order), math.prod(self.shape) // len(self.order)
            panels = replace(packed_blocks(read, CODES[self.type], columns, 1, False, like=like), **layout)
        else:
            panels = packed_blocks(read, CODES[self.type], self.shape, self.inner, self.first, like=like)
        drop(self.raw.ctypes.data, self.raw.nbytes)
        return panels

    @property
    def nbytes(self) -> int:
        """The size of the packed weight in bytes."""
        first_row = blocks(self.type, self.raw[:1])
        return packed_bytes(len(self.order), first_row, CODES[self.type])


class BlockedWeights:
    """The weights of a GGUF file that can be used in their blocks, by this project's parameter names.

    Args:
        mapped: reads the file's tensors as floats under these names.
    """

    def __init__(self, file: GGUF, mapped: MappedTensors):
        self.file, self.mapped = file, mapped
        self._stamp = _stamp(file)

    @property
    def has_changed(self) -> bool:
        """Whether another program has changed or replaced the file since it was opened."""
        return self._stamp != _stamp(self.file)

    def of(self, name: str, inner: int, first: bool, has_experts: bool = False) -> BlockRows | None:
        """Returns a weight as rows of a tensor in blocks; None if its blocks cannot be used.

        Args:
            inner, first: the number of axes that the product sums, and whether these come first, as in `Panels`.
            has_experts: whether the first axis of the weight is that of experts.
        """
        if name not in self.mapped.names:
            return None
        theirs = self.mapped.source(name)
        kind, shape = self.file.type(theirs), self.file.shape(theirs)
        if kind not in CODES or len(shape) != (3 if has_experts else 2) or shape[-1] % BY_NAME[kind].values:
            return None
        ours = self.mapped.shape(name)
        experts = ours[0] if has_experts else 0
        rows, columns = (self._numbers(name, theirs, by_row, inner, first, experts) for by_row in (True, False))
        if rows is None or columns is None or rows.shape[1] != shape[-1]:
            return None
        if not alike(rows.T) or not alike(columns) or (columns[0] != np.arange(shape[-1])).any():
            return None
        if experts and len(rows) // experts % PANEL:
            return None
        raw = self.file.raw(theirs)
        return BlockRows(kind, raw.reshape(-1, raw.shape[-1]), rows[:, 0].copy(), ours, inner, first, experts)

    def _numbers(self, name: str, theirs: str, by_row: bool, inner: int, first: bool, experts: int) -> np.ndarray | None:
        """For each number of the weight, the row or column of the file's tensor that it comes from, [kept summed]. None if the weight
        is made from several tensors."""
        places = IndexTensors(self.mapped.reader, by_row)
        numbers = self.mapped.with_reader(places).read(name)
        if places.asked != {theirs}:
            return None
        shape = numbers.shape[1:] if experts else numbers.shape
        summed = math.prod(shape[:inner] if first else shape[len(shape) - inner :])
        matrices = numbers.reshape(max(experts, 1), *((summed, -1) if first else (-1, summed)))
        return (matrices.transpose(0, 2, 1) if first else matrices).reshape(-1, summed)


class Origin:
    """The blocks that float weights were read from. They are given only while a weight is the same array and the file is unchanged.

    Args:
        weights: the arrays that were read, by parameter name. They are referenced weakly.
    """

    def __init__(self, blocks: BlockedWeights, weights: Mapping[str, Any]):
        self.blocks = blocks
        self._of = {address: weakref.ref(a) for address, a in weights.items()}

    def rows(self, address: str, weight: Any, inner: int, first: bool) -> BlockRows | None:
        """Returns the blocks of a weight; None if its blocks cannot be used, or if the array or the file has changed. Other arguments
        are those of `BlockedWeights.of`."""
        reference = self._of.get(address)
        if reference is None or reference() is not weight or weight.dtype != np.float32 or self.blocks.has_changed:
            return None
        return self.blocks.of(address, inner, first)


class IndexTensors:
    """A reader of tensors that hold the row number, or the column number, of each of their elements.

    Args:
        like: the reader whose names and shapes these tensors have.
        by_row: whether elements are row numbers, and not column numbers.

    Attributes:
        asked: the names that were read.
    """

    def __init__(self, like: Any, by_row: bool):
        self.like, self.by_row = like, by_row
        self.asked: set[str] = set()

    @property
    def names(self) -> KeysView[str]:
        return self.like.names

    def shape(self, name: str) -> Shape:
        return self.like.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.int32)

    def read(self, name: str) -> np.ndarray:
        self.asked.add(name)
        shape = self.shape(name)
        # A view of one row or one column, however large the tensor is.
        if self.by_row:
            return np.broadcast_to(np.arange(math.prod(shape[:-1]), dtype=np.int32).reshape(*shape[:-1], 1), shape)
        return np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)


def _stamp(file: GGUF) -> tuple[int, ...] | None:
    try:
        stat = file.path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def alike(a: np.ndarray) -> bool:
    """Whether all rows of a matrix are equal."""
    return a.strides[0] == 0 or all((a[at : at + AT_ONCE] == a[0]).all() for at in range(0, len(a), AT_ONCE))
