"""compressed-tensors' `nvfp4-pack-quantized` and `mxfp4-pack-quantized`: floats of four bits, two in a byte.

    NAME.weight_packed          uint8 [outputs, inputs / 2], the first in the low bits: sign, two bits of exponent, one of mantissa
    NAME.weight_scale           NVFP4: fp8 e4m3 [outputs, inputs / 16]. MXFP4: uint8 [outputs, inputs / 32], the exponent plus 127
    NAME.weight_global_scale    NVFP4: float32 [1], by which scales are divided

(compressed-tensors 0.20, compressors/nvfp4 and compressors/mxfp4.)
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from argosy.core.errors import BadInput, Damaged
from argosy.core.formats import TensorReader, quoted
from argosy.weights.hub.quantized.module import UINT8, PackedModule, check_tensor, finite_scales, group_of

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCKS = {"nvfp4": 16, "mxfp4": 32}


@dataclass(frozen=True)
class Fp4Packed(PackedModule):
    """A module of these layouts."""

    layout = "nvfp4-pack-quantized"

    @staticmethod
    def of(name: str, tensors: TensorReader, args: dict[str, Any], *, format: str, **activations: Any) -> "Fp4Packed":
        """Checks the tensors of a module; arguments and errors as `PackQuantized.of`.

        Args:
            format: nvfp4 or mxfp4.
        """
        if args.get("num_bits") != 4 or args.get("type") != "float" or not args.get("symmetric", True):
            raise BadInput(f"{quoted(name)}: {format} whose weights are not symmetric floats of four bits is not supported")
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
        name = f"{self.name}.weight_scale"
        if self.is_two_level:
            finite_scales(tensors, name)
        scale = tensors.read(name)
        if not self.is_two_level and (scale == 255).any():
            raise Damaged(f"{quoted(name)}: an exponent of 255 does not stand for a number")
        return scale

    def outer(self, tensors: TensorReader) -> np.ndarray:
        name = f"{self.name}.weight_global_scale"
        divisor = finite_scales(tensors, name)
        if not (divisor > 0).all():
            raise Damaged(f"{quoted(name)} is {divisor[0]}, by which scales are divided")
        return np.float32(1) / divisor
