"""Int8 weights: `swap(model, where, int8)`.

Symmetric int8, round to nearest (Jacob et al. 2017, arXiv:1712.05877, section 2, without zero points), with a float32 scale for
each output channel of a contraction and each row of an embedding. It takes a quarter of the memory of float32. On a CPU it is
slower than float32, because XLA first widens the weight, so it only saves memory there. Other formats are other numbers in the
same `Quantized` array.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.core.errors import BadInput
from argosy.models.parts.einsum import Contraction, Einsum
from argosy.models.parts.weight import Codes, Draw, Meaning
from argosy.ops.quantized import Quantized


class QuantizedEinsum(Contraction):
    """An `Einsum` whose weight is a quantized array and is not trained.

    Args:
        of: the contraction it replaces.
        w: its weight, quantized, or only the shapes of that.
    """

    def __init__(self, of: Einsum, w: Quantized):
        self.eq, self.b = of.eq, of.b
        meaning = of.w.get_metadata()["meaning"]
        # Scales have every letter of the weight, and size 1 along shared axes.
        scales = Meaning(meaning.letters, "", meaning.group)
        self.values = Codes(w.values, meaning=meaning, draw=Draw())
        self.scale = Codes(w.scale, meaning=scales, draw=Draw())
        self.zero = None if w.zero is None else Codes(w.zero, meaning=scales, draw=Draw())
        self.x_scale = None if w.x_scale is None else Codes(w.x_scale, meaning=Meaning(""), draw=Draw())

    @property
    def weight(self) -> Quantized:
        zero = None if self.zero is None else self.zero[...]
        return Quantized(self.values[...], self.scale[...], zero, None if self.x_scale is None else self.x_scale[...])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


def int8(of: Contraction) -> QuantizedEinsum:
    """Returns a contraction with its weight in int8.

    Raises:
        BadInput: it is quantized already, or has an adapter.
    """
    if not isinstance(of, Einsum):
        what = "is quantized already" if isinstance(of, QuantizedEinsum) else "has an adapter"
        raise BadInput(f"int8: {of.eq} {what}", hint="quantize the plain model first, then put adapters on it")
    axes = tuple(of.stacked + i for i, letter in enumerate(of.spec) if letter not in of.scaled)
    w = of.w.get_value()
    if isinstance(w, jax.ShapeDtypeStruct):
        return QuantizedEinsum(of, jax.eval_shape(lambda w: _int8(w, axes), w))
    return QuantizedEinsum(of, _int8(w, axes))


def _int8(w: Float[Array, "..."], shared: tuple[int, ...]) -> Quantized:
    """Quantizes with one scale along the shared axes. Scales are float32, because rounding them too would double the error. A
    channel of zeros gets scale 1."""
    wide = w.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), shared, keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest / 127)
    return Quantized(jnp.round(wide / scale).astype(jnp.int8), scale)


def is_quantized(model: nnx.Module) -> bool:
    """Whether any contraction of the model is quantized."""
    return any(isinstance(m, QuantizedEinsum) for _, m in nnx.iter_modules(model))


