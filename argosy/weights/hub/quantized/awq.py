"""AWQ as AutoAWQ packs it for its matrix products (`version` gemm): four bits, zero points, groups of inputs.

    NAME.qweight    int32 [inputs, outputs / 8]
    NAME.qzeros     int32 [groups, outputs / 8]
    NAME.scales     float16 [groups, outputs]

A word holds the numbers of eight outputs, from the lowest bits up in the order 0 2 4 6 1 3 5 7. w = (q - zero) * scale.
(Lin et al. 2023, arXiv:2306.00978; AutoAWQ 0.2, awq/modules/linear/gemm.py.)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.formats import TensorReader
from argosy.weights.hub.quantized.module import (
    FLOATS,
    INT32,
    PackedModule,
    check_tensor,
    finite_scales,
    group_of,
    unpacked_words,
)

# The position of each of eight outputs in its word.
PLACES = np.asarray([0, 4, 1, 5, 2, 6, 3, 7])


@dataclass(frozen=True)
class AwqPacked(PackedModule):
    """A module whose weight is stored in this layout."""

    layout = "awq"

    @staticmethod
    def of(name: str, tensors: TensorReader, settings: dict[str, Any]) -> "AwqPacked":
        """Checks the tensors of a module and describes it.

        Args:
            settings: the `quantization_config` of config.json.

        Raises:
            BadInput, Damaged: an error of `check_tensor`, or the version or the number of bits is not supported.
        """
        version = str(settings.get("version", "gemm")).lower()[:20]
        bits, zeros = settings.get("bits", settings.get("w_bit", 4)), settings.get("zero_point", True)
        if version != "gemm" or bits != 4 or not zeros:
            variant = f"version {version}, {str(bits)[:20]} bits, {'zero points' if zeros else 'no zero points'}"
            raise BadInput(f"`awq` with {variant} is not supported", hint="version gemm with 4 bits and zero points is")
        inputs, words = check_tensor(tensors, f"{name}.qweight", INT32)
        group = group_of(settings.get("group_size", settings.get("q_group_size", 128)), inputs, name)
        check_tensor(tensors, f"{name}.qzeros", INT32, (inputs // group, words))
        check_tensor(tensors, f"{name}.scales", FLOATS, (inputs // group, 8 * words))
        names = tuple(f"{name}.{end}" for end in ("qweight", "qzeros", "scales"))
        return AwqPacked(name, names, "int4", (8 * words, inputs), (1, group), minima=True)

    def values(self, tensors: TensorReader) -> np.ndarray:
        return _in_order(tensors.read(f"{self.name}.qweight"))

    def scale(self, tensors: TensorReader) -> np.ndarray:
        return finite_scales(tensors, f"{self.name}.scales").T

    def minimum(self, tensors: TensorReader) -> np.ndarray:
        return _in_order(tensors.read(f"{self.name}.qzeros")).astype(np.float32) * self.scale(tensors)


def _in_order(words: np.ndarray) -> np.ndarray:
    """Unpacks words to numbers, [outputs, rows of the words]."""
    numbers = unpacked_words(np.ascontiguousarray(words), 4, 1)
    return numbers.reshape(len(words), -1, 8)[:, :, PLACES].reshape(len(words), -1).T
