"""compressed-tensors' `int-quantized`, `float-quantized` and `naive-quantized`, which store each number of a weight in eight bits. And
`fp8`, in which DeepSeek-V3 is published (arXiv:2412.19437), with `weight_scale_inv` in place of `weight_scale`.

    NAME.weight              int8 or fp8 e4m3 [outputs, inputs]
    NAME.weight_scale        [1] for a tensor, [outputs, 1] for channels, [outputs, groups], or one for each tile
    NAME.weight_zero_point   int8 in the shape of the scales, asymmetric modules only

(compressed-tensors 0.20, compressors/naive_quantized.)
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from argosy.core.errors import BadInput
from argosy.core.formats import TensorReader, quote_name
from argosy.weights.hub.quantized.module import FLOATS, PackedModule, check_tensor, finite_scales, group_of

KINDS = {"int": ("int8", np.dtype(np.int8)), "float": ("fp8_e4m3", np.dtype(ml_dtypes.float8_e4m3fn))}


@dataclass(frozen=True)
class NaiveQuantized(PackedModule):
    """A module whose weight is stored in this layout."""

    scales: str = "weight_scale"

    layout = "int-quantized"

    @staticmethod
    def of(
        name: str, tensors: TensorReader, args: dict[str, Any], *, scales: str = "weight_scale", **activations: Any
    ) -> "NaiveQuantized":
        """Checks the tensors of a module and describes it. Other arguments and errors are those of `PackQuantized.of`.

        Args:
            scales: the last part of the name of the scales.
        """
        bits, kind = args.get("num_bits", 8), str(args.get("type", "int"))
        if bits != 8 or kind not in KINDS:
            raise BadInput(f"{quote_name(name)}: {kind[:20]} of {str(bits)[:20]} bits, unpacked, is not supported", hint="int8 or fp8")
        format, dtype = KINDS[kind]
        shape = check_tensor(tensors, f"{name}.weight", (dtype,))
        block = _block(args, shape, name)
        counts = tuple(-(-size // each) for size, each in zip(shape, block, strict=True))
        # Of one number for the tensor, [1], [1, 1] and [] are all written.
        stored = tuple(tensors.shape(f"{name}.{scales}")) if f"{name}.{scales}" in tensors.names else counts
        check_tensor(tensors, f"{name}.{scales}", FLOATS, stored if counts == (1, 1) and stored in ((), (1,)) else counts)
        names, minima = ["weight", scales], not args.get("symmetric", True)
        if minima:
            names.append("weight_zero_point")
            check_tensor(tensors, f"{name}.weight_zero_point", (np.dtype(np.int8),), stored)
        ends = tuple(f"{name}.{end}" for end in names)
        return NaiveQuantized(name, ends, format, shape, block, minima, **activations, scales=scales)

    def values(self, tensors: TensorReader) -> np.ndarray:
        return tensors.read(f"{self.name}.weight")

    def scale(self, tensors: TensorReader) -> np.ndarray:
        return finite_scales(tensors, f"{self.name}.{self.scales}").reshape(self.blocks)

    def minimum(self, tensors: TensorReader) -> np.ndarray:
        zeros = tensors.read(f"{self.name}.weight_zero_point")
        return np.asarray(zeros, np.float32).reshape(self.blocks) * self.scale(tensors)


def _block(args: dict[str, Any], shape: tuple[int, ...], name: str) -> tuple[int, int]:
    """Returns the numbers of rows and of columns that share a scale."""
    strategy = args.get("strategy")
    if strategy == "tensor":
        return shape[0], shape[1]
    if strategy == "channel":
        return 1, shape[1]
    if strategy == "group":
        return 1, group_of(args.get("group_size"), shape[1], name)
    sides = args.get("block_structure")
    if strategy == "block" and isinstance(sides, list) and len(sides) == 2 and all(type(n) is int and n > 0 for n in sides):
        return sides[0], sides[1]
    problem = f"{quote_name(name)}: scales by the strategy `{str(strategy)[:40]}` are not supported"
    raise BadInput(problem, hint="tensor, channel, group and block are")
