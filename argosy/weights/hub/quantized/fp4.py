"""compressed-tensors' `nvfp4-pack-quantized` and `mxfp4-pack-quantized`: four-bit floats, two in a byte.

    NAME.weight_packed          uint8 [outputs, inputs / 2], the first in the low bits: sign, two bits of exponent, one of mantissa
    NAME.weight_scale           NVFP4: fp8 e4m3 [outputs, inputs / 16]. MXFP4: uint8 [outputs, inputs / 32], the exponent plus 127
    NAME.weight_global_scale    NVFP4: float32 [1], by which scales are divided

(compressed-tensors 0.20, compressors/nvfp4 and compressors/mxfp4.) The experts of gpt-oss are published like this (arXiv:2508.10925):

    NAME_blocks                 uint8 [experts, outputs, inputs / 32, 16], the first float in the low bits
    NAME_scales                 uint8 [experts, outputs, inputs / 32], the exponent plus 127
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from argosy.core.errors import BadInput, Damaged
from argosy.core.formats import TensorReader, quote_name
from argosy.weights.hub.quantized.module import UINT8, PackedModule, check_tensor, finite_scales, group_of

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCKS = {"nvfp4": 16, "mxfp4": 32}


@dataclass(frozen=True)
class Fp4Packed(PackedModule):
    """A module whose weight is stored in one of the two layouts of compressed-tensors."""

    layout = "nvfp4-pack-quantized"

    @staticmethod
    def of(name: str, tensors: TensorReader, args: dict[str, Any], *, format: str, **activations: Any) -> "Fp4Packed":
        """Checks the tensors of a module and describes it. Other arguments and errors are those of `PackQuantized.of`.

        Args:
            format: nvfp4 or mxfp4.
        """
        if args.get("num_bits") != 4 or args.get("type") != "float" or not args.get("symmetric", True):
            raise BadInput(f"{quote_name(name)}: {format} whose weights are not symmetric floats of four bits is not supported")
        rows, packed = check_tensor(tensors, f"{name}.weight_packed", UINT8)
        block = group_of(args.get("group_size", BLOCKS[format]), 2 * packed, name)
        names = ["weight_packed", "weight_scale"]
        check_tensor(tensors, f"{name}.weight_scale", (E4M3,) if format == "nvfp4" else UINT8, (rows, 2 * packed // block))
        if format == "nvfp4":
            names.append("weight_global_scale")
            check_tensor(tensors, f"{name}.weight_global_scale", (np.dtype(np.float32),), (1,))
        return Fp4Packed(name, tuple(f"{name}.{end}" for end in names), format, (rows, 2 * packed), (1, block), **activations)

    def values(self, tensors: TensorReader) -> np.ndarray:
        packed = tensors.read(f"{self.name}.weight_packed")
        return np.stack([packed & 0xF, packed >> 4], -1).reshape(self.shape)

    def scale(self, tensors: TensorReader) -> np.ndarray:
        if not self.is_two_level:
            return _exponents(tensors, self.stored_scale)
        finite_scales(tensors, self.stored_scale)
        return tensors.read(self.stored_scale)

    def outer(self, tensors: TensorReader) -> np.ndarray:
        name = f"{self.name}.weight_global_scale"
        divisor = finite_scales(tensors, name)
        if not (divisor > 0).all():
            raise Damaged(f"{quote_name(name)} is {divisor[0]}, by which scales are divided")
        return np.float32(1) / divisor


@dataclass(frozen=True)
class Mxfp4Experts(PackedModule):
    """The experts of a layer of gpt-oss, in one tensor [experts, outputs, inputs]."""

    layout = "mxfp4"

    @staticmethod
    def of(name: str, tensors: TensorReader) -> "Mxfp4Experts":
        """Checks the two tensors of a weight and describes it.

        Raises:
            BadInput, Damaged: the two tensors do not fit together.
        """
        *lead, groups, bytes_of = tuple(tensors.shape(f"{name}_blocks"))
        check_tensor(tensors, f"{name}_blocks", UINT8, (*lead, groups, 16))
        check_tensor(tensors, f"{name}_scales", UINT8, (*lead, groups))
        return Mxfp4Experts(name, (f"{name}_blocks", f"{name}_scales"), "mxfp4", (*lead, 2 * groups * bytes_of), (1, BLOCKS["mxfp4"]))

    @property
    def weight(self) -> str:
        return self.name

    @property
    def stored_scale(self) -> str:
        return f"{self.name}_scales"

    @property
    def blocks(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.shape[-1] // self.block[1])

    def whole(self, blocks: np.ndarray) -> np.ndarray:
        return np.repeat(blocks, self.block[1], -1)

    def values(self, tensors: TensorReader) -> np.ndarray:
        packed = tensors.read(f"{self.name}_blocks")
        return np.stack([packed & 0xF, packed >> 4], -1).reshape(self.shape)

    def scale(self, tensors: TensorReader) -> np.ndarray:
        return _exponents(tensors, self.stored_scale)


def _exponents(tensors: TensorReader, name: str) -> np.ndarray:
    """Reads the exponents of scales that are powers of two.

    Raises:
        Damaged: an exponent is 255, which stands for no number.
    """
    scale = tensors.read(name)
    if (scale == 255).any():
        raise Damaged(f"{quote_name(name)}: an exponent of 255 does not stand for a number")
    return scale
