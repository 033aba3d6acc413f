"""A multi-layer perceptron of dense layers with biases and a ReLU between them, for rankers and two-tower models."""

from collections.abc import Sequence
from itertools import pairwise

import jax
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.parts.einsum import Einsum

LEGEND = (("I", "inputs"), ("O", "outputs"))


class DenseLayers(nnx.Module):
    """Dense layers. `widths` are the width of the input, then of each layer's output. The last layer has no activation."""

    def __init__(self, widths: Sequence[int]):
        self.count = len(widths) - 1
        for i, (inner, outer) in enumerate(pairwise(widths)):
            setattr(self, str(i), Einsum("BI,IO->BO", {"I": inner, "O": outer}, bias=True, legend=LEGEND))

    def __call__(self, x: Float[Array, "B I"]) -> Float[Array, "B O"]:
        for i in range(self.count):
            x = getattr(self, str(i))(x)
            x = jax.nn.relu(x) if i + 1 < self.count else x
        return x
