"""Reads a quantized Hub folder under the names of an unquantized one, with each packed module as "NAME.weight".

In place of floats, the same reader can give the codes, or scales or zero points repeated to the shape of the weight. A `KeyMap` only
moves numbers, so it maps all of these to the axes of our models.
"""

from collections.abc import Iterable, KeysView
from typing import Literal

import numpy as np

from argosy.adapt.formats.table import FORMATS
from argosy.core.formats import Shape, TensorReader, read_part
from argosy.weights.hub.quantized.module import PackedModule
from argosy.weights.hub.quantized.settings import SCALES_OF_DATA

Part = Literal["floats", "values", "scale", "minimum", "outer", "x_scale", "blocks"]


class PackedTensors:
    """A `TensorReader` of a folder with packed modules.

    Args:
        part: what is read in place of packed weights. `blocks` reads the index of the block that each number is in.
    """

    def __init__(self, tensors: TensorReader, modules: Iterable[PackedModule], part: Part = "floats"):
        self.tensors, self.part = tensors, part
        self.modules = {module.weight: module for module in modules}
        self._first = {name: np.uint32((i % 15) << 28) for i, name in enumerate(self.modules)}
        weight_of = {name: weight for weight, module in self.modules.items() for name in module.tensors}
        # In the order of the files.
        plain = (name for name in tensors.names if name.rpartition(".")[2] not in SCALES_OF_DATA)
        self._names = dict.fromkeys(weight_of.get(name, name) for name in plain)

    def with_part(self, part: Part) -> "PackedTensors":
        """Returns a reader of the same tensors that reads another part in place of packed weights."""
        return PackedTensors(self.tensors, self.modules.values(), part)

    @property
    def names(self) -> KeysView[str]:
        return self._names.keys()

    def shape(self, name: str) -> Shape:
        return self.modules[name].shape if name in self.modules else self.tensors.shape(name)

    def dtype(self, name: str) -> np.dtype:
        if (module := self.modules.get(name)) is None:
            return self.tensors.dtype(name)
        if self.part == "blocks":
            return np.dtype(np.uint32)
        if self.part == "values":
            bits = FORMATS[module.format].bits
            return np.dtype(np.uint8) if bits < 8 else self.tensors.dtype(name) if name in self.tensors.names else np.dtype(np.int8)
        stored = self.part == "scale" and FORMATS[module.format].scales != "float32"
        return self.tensors.dtype(module.stored_scale) if stored else np.dtype(np.float32)

    def read(self, name: str) -> np.ndarray:
        if (module := self.modules.get(name)) is None:
            return self.tensors.read(name)
        match self.part:
            case "floats":
                return module.floats(self.tensors)
            case "values":
                return module.values(self.tensors)
            case "scale":
                return module.whole(module.scale(self.tensors))
            case "minimum":
                return module.whole(module.minimum(self.tensors))
            case "x_scale":
                return np.broadcast_to(module.input_scale(self.tensors), module.shape)
            case "outer":
                return np.broadcast_to(module.outer(self.tensors), module.shape)
            case _:
                # The indices of blocks must differ between neighboring modules.
                numbers = np.arange(np.prod(module.blocks), dtype=np.uint32).reshape(module.blocks)
                return module.whole(numbers + self._first[name])

    def read_part(self, name: str, i: int) -> np.ndarray:
        return self.read(name)[i] if name in self.modules else read_part(self.tensors, name, i)
