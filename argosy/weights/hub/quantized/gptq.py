"""GPTQ as AutoGPTQ and GPTQModel pack it: 2, 4 or 8 bits, groups of inputs.

    NAME.qweight    int32 [inputs * bits / 32, outputs], packed along the inputs, the first in the lowest bits
    NAME.qzeros     int32 [groups, outputs * bits / 32], each zero point minus one (in gptq_v2 the zero point itself)
    NAME.scales     float16 [groups, outputs]
    NAME.g_idx      int32 [inputs], the group of each input

w = (q - zero) * scale[g_idx]. With `desc_act`, inputs were quantized in the order of their activations. Unless `static_groups` was
set, the inputs of a group are then not neighbors, and the weight is read as floats. (Frantar et al. 2022, arXiv:2210.17323; AutoGPTQ
0.7, nn_modules/qlinear.)
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
from argosy.weights.hub.quantized.pack_quantized import column_groups


@dataclass(frozen=True)
class GptqPacked(PackedModule):
    """A module whose weight is stored in this layout.

    bits: the number of bits of each code.
    shift: the number that is added to stored zero points.
    """

    bits: int = 4
    shift: int = 1

    layout = "gptq"

    @staticmethod
    def of(name: str, tensors: TensorReader, settings: dict[str, Any]) -> "GptqPacked":
        """Checks the tensors of a module and describes it.

        Args:
            settings: the `quantization_config` of config.json.

        Raises:
            BadInput, Damaged: an error of `check_tensor`, or the format or the number of bits is not supported.
        """
        bits, version = settings.get("bits", 4), str(settings.get("checkpoint_format", "gptq"))[:20]
        if bits not in INTEGERS or version not in ("gptq", "gptq_v2"):
            problem = f"`gptq` with {str(bits)[:20]} bits, packed as {version}, is not supported"
            raise BadInput(problem, hint="2, 4 or 8 bits of gptq or gptq_v2 are")
        words, outputs = check_tensor(tensors, f"{name}.qweight", INT32)
        inputs = words * (32 // bits)
        group = group_of(settings.get("group_size", 128), inputs, name)
        check_tensor(tensors, f"{name}.scales", FLOATS, (inputs // group, outputs))
        names = ["qweight", "scales"]
        if not settings.get("sym", False) or f"{name}.qzeros" in tensors.names:
            names.append("qzeros")
            check_tensor(tensors, f"{name}.qzeros", INT32, (inputs // group, -(-outputs * bits // 32)))
        columns = None
        if f"{name}.g_idx" in tensors.names:
            names.append("g_idx")
            columns = column_groups(tensors, f"{name}.g_idx", inputs, group)
        elif settings.get("desc_act"):
            raise BadInput(f"{quote_name(f'{name}.g_idx')} is missing", hint="desc_act orders inputs, and this tensor says how")
        return GptqPacked(
            *(name, tuple(f"{name}.{end}" for end in names), INTEGERS[bits], (outputs, inputs), (1, group)),
            minima=not settings.get("sym", False),
            columns=columns,
            bits=bits,
            shift=1 if version == "gptq" else 0,
        )

    def values(self, tensors: TensorReader) -> np.ndarray:
        if not self.minima and f"{self.name}.qzeros" in self.tensors and (self._zeros(tensors) != 1 << (self.bits - 1)).any():
            problem = f"{quote_name(f'{self.name}.qzeros')}: zero points differ from the middle"
            raise Damaged(problem, hint="config.json says symmetric (`sym`): is it the one that belongs to these weights?")
        return signed_if_eight(unpacked_words(tensors.read(f"{self.name}.qweight"), self.bits, 0).T, self.bits)

    def scale(self, tensors: TensorReader) -> np.ndarray:
        return finite_scales(tensors, f"{self.name}.scales").T

    def minimum(self, tensors: TensorReader) -> np.ndarray:
        return signed_if_eight(self._zeros(tensors), self.bits).astype(np.float32) * self.scale(tensors)

    def _zeros(self, tensors: TensorReader) -> np.ndarray:
        """Reads the zero points, [outputs, groups]."""
        words = np.ascontiguousarray(tensors.read(f"{self.name}.qzeros"))
        zeros = unpacked_words(words, self.bits, 1)[:, : self.shape[0]].T
        # A zero point of 0 is stored as the largest number, which wraps around here.
        return zeros + np.uint8(self.shift) & np.uint8((1 << self.bits) - 1)
