"""compressed-tensors' `pack-quantized`: integers of 2, 4 or 8 bits in 32-bit words.

    NAME.weight_packed       int32 [outputs, ceil(inputs * bits / 32)], the first number in the lowest bits, each plus 2^(bits - 1)
    NAME.weight_scale        [outputs, groups]
    NAME.weight_shape        [outputs, inputs] as numbers
    NAME.weight_zero_point   int32 [ceil(outputs * bits / 32), groups], packed along the outputs; asymmetric modules only
    NAME.weight_g_idx        [inputs], the group of each input, in folders from before 2026 whose columns were reordered

(compressed-tensors 0.20, compressors/pack_quantized.)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from argosy.core.errors import BadInput, Damaged
from argosy.core.formats import TensorReader, quote_name
from argosy.weights.hub.quantized.module import (
    FLOATS,
    INT32,
    INTEGERS,
    PackedModule,
    check_tensor,
    finite_scales,
    group_of,
    signed_if_eight,
    unpacked_words,
)


@dataclass(frozen=True)
class PackQuantized(PackedModule):
    """A module whose weight is stored in this layout.

    bits: the number of bits of each code.
    """

    bits: int = 4

    layout = "pack-quantized"

    @staticmethod
    def of(name: str, tensors: TensorReader, args: dict[str, Any], **activations: Any) -> "PackQuantized":
        """Checks the tensors of a module and describes it.

        Args:
            args: the entry `weights` of the quantization in config.json.
            activations: the fields of `PackedModule` that say how the inputs of the module are rounded.

        Raises:
            BadInput, Damaged: an error of `check_tensor`, or the number of bits is not supported.
        """
        bits = args.get("num_bits", 8)
        if bits not in INTEGERS or args.get("type", "int") != "int":
            problem = f"{quote_name(name)}: {str(args.get('type', 'int'))[:20]} of {str(bits)[:20]} bits, packed, is not supported"
            raise BadInput(problem, hint="int of 2, 4 or 8 bits is")
        rows, words = check_tensor(tensors, f"{name}.weight_packed", INT32)
        shape = _stated_shape(tensors, f"{name}.weight_shape")
        if shape[0] != rows or -(-shape[1] * bits // 32) != words:
            problem = f"`weight_packed` is {[rows, words]}, which does not hold {list(shape)} numbers of {bits} bits"
            raise BadInput(f"{quote_name(name)}: {problem}")
        group = group_of(args.get("group_size"), shape[1], name)
        scales = check_tensor(tensors, f"{name}.weight_scale", FLOATS, (rows, shape[1] // group))
        names, minima = ["weight_packed", "weight_scale", "weight_shape"], not args.get("symmetric", True)
        if minima:
            names.append("weight_zero_point")
            check_tensor(tensors, f"{name}.weight_zero_point", INT32, (-(-rows * bits // 32), scales[1]))
        columns = None
        if f"{name}.weight_g_idx" in tensors.names:
            names.append("weight_g_idx")
            columns = column_groups(tensors, f"{name}.weight_g_idx", shape[1], group)
        paths = tuple(f"{name}.{end}" for end in names)
        return PackQuantized(name, paths, INTEGERS[bits], shape, (1, group), minima, **activations, columns=columns, bits=bits)

    def values(self, tensors: TensorReader) -> np.ndarray:
        codes = unpacked_words(tensors.read(f"{self.name}.weight_packed"), self.bits, 1)[:, : self.shape[1]]
        return signed_if_eight(codes, self.bits)

    def scale(self, tensors: TensorReader) -> np.ndarray:
        return finite_scales(tensors, f"{self.name}.weight_scale")

    def minimum(self, tensors: TensorReader) -> np.ndarray:
        zeros = unpacked_words(tensors.read(f"{self.name}.weight_zero_point"), self.bits, 0)[: self.shape[0]]
        return signed_if_eight(zeros, self.bits).astype(np.float32) * self.scale(tensors)


def column_groups(tensors: TensorReader, name: str, columns: int, group: int) -> np.ndarray | None:
    """Reads the index of each column's group (`g_idx`); None where groups are of neighboring columns in order.

    Args:
        columns: the number of columns.
        group: the number of columns of a group.

    Raises:
        BadInput: the tensor is missing, or its length is not `columns`.
        Damaged: the tensor names a group that does not exist.
    """
    check_tensor(tensors, name, (np.dtype(np.int32), np.dtype(np.int64)), (columns,))
    groups = np.asarray(tensors.read(name))
    # -1 means that the columns of the module were not reordered.
    if (groups == -1).all() or np.array_equal(groups, np.arange(columns) // group):
        return None
    if groups.min() < 0 or groups.max() >= columns // group:
        raise Damaged(f"{quote_name(name)}: groups from {groups.min()} to {groups.max()} of {columns // group}")
    return groups


def _stated_shape(tensors: TensorReader, name: str) -> tuple[int, int]:
    check_tensor(tensors, name, (np.dtype(np.int64), np.dtype(np.int32)), (2,))
    rows, columns = (int(n) for n in tensors.read(name))
    return rows, columns
