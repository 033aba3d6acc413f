"""A module of a Hub folder whose weight is packed, described in the same way for every layout.

    w[o, i] = (values[o, i] - zero) * scale[o, i] - minimum[o, i]

A weight has two axes, [outputs, inputs]. A scale belongs to a block of rows and columns, and blocks at the edges may be partial.
Values are the codes of `adapt.formats`: integers of eight bits are signed, integers of fewer bits begin at 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from argosy.adapt.formats.format import TINY, Integers
from argosy.adapt.formats.table import E2M1, FORMATS
from argosy.core.errors import BadInput, Damaged
from argosy.core.formats import Shape, TensorReader, quote_name

FLOATS = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
INT32, UINT8 = (np.dtype(np.int32),), (np.dtype(np.uint8),)
LEVELS = np.asarray((*E2M1, *(-m for m in E2M1)), np.float32)


@dataclass(frozen=True)
class PackedModule:
    """One packed module.

    name: the path of the module in the Hub's names.
    tensors: the names of the tensors that the folder has in place of the weight.
    format: the number format, a key of `FORMATS`.
    shape: the shape of the weight, [outputs, inputs].
    block: the numbers of rows and of columns that share a scale.
    minima: whether there are zero points.
    activations, activation_block, activations_scale: the fields of `adapt.quant.Scheme`.
    columns: the index of each column's block where the columns of a block are not neighbors, else None.
    """

    name: str
    tensors: tuple[str, ...]
    format: str
    shape: Shape
    block: tuple[int, int]
    minima: bool = False
    activations: str | None = None
    activation_block: int | None = None
    activations_scale: str = "dynamic"
    columns: Any = None

    layout: ClassVar[str] = ""

    @property
    def weight(self) -> str:
        """The Hub's name of the weight that is packed."""
        return f"{self.name}.weight"

    @property
    def stored_scale(self) -> str:
        """The name of the tensor of scales."""
        return f"{self.name}.weight_scale"

    def values(self, tensors: TensorReader) -> np.ndarray:
        """Reads the codes, in the shape of the weight."""
        raise NotImplementedError

    def scale(self, tensors: TensorReader) -> np.ndarray:
        """Reads the scale of each block, as the format stores it, [blocks of rows, blocks of columns].

        Raises:
            Damaged: a scale is not a finite number.
        """
        raise NotImplementedError

    def minimum(self, tensors: TensorReader) -> np.ndarray:
        """Reads the number that is subtracted in each block, float32: zero point times scale."""
        raise NotImplementedError

    def outer(self, tensors: TensorReader) -> np.ndarray:
        """Reads the second-level scale, one float32 number."""
        raise NotImplementedError

    def input_scale(self, tensors: TensorReader) -> np.ndarray:
        """Reads the static scale of the module's inputs, one float32 number.

        Raises:
            Damaged: the scale is not positive.
        """
        scale = finite_scales(tensors, f"{self.name}.input_scale").reshape(())
        if scale < TINY:
            raise Damaged(f"{quote_name(self.name)}: the scale of its inputs is {float(scale):g}")
        return scale

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of blocks along the rows and along the columns."""
        return tuple(-(-size // each) for size, each in zip(self.shape, self.block, strict=True))

    @property
    def is_two_level(self) -> bool:
        return FORMATS[self.format].scales == "e4m3"

    def whole(self, blocks: np.ndarray) -> np.ndarray:
        """Repeats one number per block to the shape of the weight."""
        rows = np.repeat(blocks, self.block[0], 0)[: self.shape[0]]
        if self.columns is not None:
            return rows[:, self.columns]
        return np.repeat(rows, self.block[1], 1)[:, : self.shape[1]]

    def floats(self, tensors: TensorReader) -> np.ndarray:
        """Reads and dequantizes the weight, float32."""
        values, scale = self.values(tensors), self.scale(tensors)
        elements = FORMATS[self.format].elements
        if isinstance(elements, Integers):
            w = values.astype(np.float32)
            if elements.bits < 8 and not self.minima:
                w -= 1 << (elements.bits - 1)
        else:
            w = LEVELS[values] if elements.bits == 4 else values.astype(np.float32)
        if scale.dtype == np.uint8:
            scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
        elif self.is_two_level:
            scale = scale.astype(np.float32) * self.outer(tensors)
        w *= self.whole(scale)
        if self.minima:
            w -= self.whole(self.minimum(tensors))
        return w


def check_tensor(tensors: TensorReader, name: str, kinds: Sequence[np.dtype], shape: Shape | None = None) -> Shape:
    """Checks a tensor of a packed module without reading it, and returns its shape.

    Args:
        kinds: the permitted types.
        shape: the required shape. None permits any shape with two axes.

    Raises:
        BadInput: the tensor is missing, or has another shape.
        Damaged: the tensor has another type.
    """
    if name not in tensors.names:
        raise BadInput(f"{quote_name(name)} is missing", hint="a packed weight needs its scales: is the folder complete?")
    if tensors.dtype(name) not in kinds:
        raise Damaged(f"{quote_name(name)} is stored as {tensors.dtype(name)}, expected {' or '.join(map(str, kinds))}")
    got = tuple(tensors.shape(name))
    if got != shape if shape is not None else len(got) != 2:
        expected = "two axes" if shape is None else str(list(shape))
        hint = "is config.json the one that belongs to these weights?"
        raise BadInput(f"{quote_name(name)} is {list(got)}, expected {expected}", hint=hint)
    return got


def check_number(tensors: TensorReader, name: str) -> None:
    """Checks a tensor that holds one float, of shape [], [1] or [1, 1]. Errors are those of `check_tensor`."""
    stored = tuple(tensors.shape(name)) if name in tensors.names else ()
    check_tensor(tensors, name, FLOATS, stored if stored in ((), (1,), (1, 1)) else (1,))


def finite_scales(tensors: TensorReader, name: str) -> np.ndarray:
    """Reads scales as float32.

    Raises:
        Damaged: a scale is not finite.
    """
    scale = np.asarray(tensors.read(name), np.float32)
    if not np.isfinite(scale).all():
        raise Damaged(f"{quote_name(name)}: a scale is not finite")
    return scale


def group_of(size: Any, columns: int, where: str) -> int:
    """Returns how many columns share a scale.

    Args:
        size: the `group_size` of the config. -1 and None mean all columns.
        where: the name of the module, for errors.

    Raises:
        BadInput: `size` is not a positive integer, or does not divide the number of columns.
    """
    if size is None or size == -1:
        return columns
    if type(size) is not int or size < 1 or columns % size:
        raise BadInput(f"{quote_name(where)}: groups of {str(size)[:20]} do not divide {columns} columns")
    return size


def unpacked_words(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Unpacks numbers of few bits, as uint8, from 32-bit words along an axis. The first number is in the lowest bits."""
    words = np.moveaxis(words, axis, -1).view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    numbers = (words[..., None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return np.moveaxis(numbers.reshape(*words.shape[:-1], -1), -1, axis)


def packed_words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Packs numbers of few bits into 32-bit words, int32, along an axis. The first number is in the lowest bits, and the last word is
    filled up with zeros."""
    codes, count = np.moveaxis(codes, axis, -1), 32 // bits
    codes = np.pad(codes, [*[(0, 0)] * (codes.ndim - 1), (0, -codes.shape[-1] % count)])
    parts = codes.reshape(*codes.shape[:-1], -1, count).astype(np.uint32) << np.arange(0, 32, bits, dtype=np.uint32)
    words = np.bitwise_or.reduce(parts, -1).view(np.int32)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


INTEGERS = {2: "int2", 4: "int4", 8: "int8"}
"""The integer format of each number of bits."""


def signed_if_eight(codes: np.ndarray, bits: int) -> np.ndarray:
    """Converts codes that begin at 0 to those of `FORMATS`: codes of eight bits become signed, codes of fewer bits stay as they are."""
    return (codes.astype(np.int16) - 128).astype(np.int8) if bits == 8 else codes
