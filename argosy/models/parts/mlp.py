"""Feed-forward layers: gated (Shazeer 2020, arXiv:2002.05202) and plain."""

from collections.abc import Callable

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from argosy.models.parts.einsum import Einsum
from argosy.models.settings import Activation
from argosy.ops.hadamard import hadamard_transform

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    # x sigmoid(1.702 x), the approximation of OpenAI's CLIP (arXiv:1606.08415).
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}


class GLU(nnx.Module):
    """The gated feed-forward layer down(act(gate(x)) * up(x)), from D features to F and back.

    rotates: whether the input of `down` is rotated (`parts.rotations`).
    """

    marks = ("ffn",)
    rotates = False

    def __init__(self, dims: dict[str, int], activation: Activation = "silu", *, bias: bool = False):
        self.activation = activation
        self.gate = Einsum("BTD,DF->BTF", dims, bias=bias)
        self.up = Einsum("BTD,DF->BTF", dims, bias=bias)
        self.down = Einsum("BTF,FD->BTD", dims, bias=bias)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = checkpoint_name(self.gate(x), "ffn"), checkpoint_name(self.up(x), "ffn")
        h = ACTIVATIONS[self.activation](gate) * up
        return self.down(hadamard_transform(h) if self.rotates else h)


class MLP(nnx.Module):
    """The plain feed-forward layer down(act(up(x))), from D features to F and back.

    rotates: as in `GLU`.
    """

    marks = ("ffn",)
    rotates = False

    def __init__(self, dims: dict[str, int], activation: Activation = "gelu", *, bias: bool = True):
        self.activation = activation
        self.up = Einsum("BTD,DF->BTF", dims, bias=bias)
        self.down = Einsum("BTF,FD->BTD", dims, bias=bias)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        h = ACTIVATIONS[self.activation](checkpoint_name(self.up(x), "ffn"))
        return self.down(hadamard_transform(h) if self.rotates else h)
