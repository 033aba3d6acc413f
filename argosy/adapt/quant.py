"""Quantized weights: `swap(model, where, int8)`, and the 4-bit formats of QLoRA.

int8 is symmetric and rounds to nearest (Jacob et al. 2017, arXiv:1712.05877, section 2, without zero points), with a float32 scale
for each output channel of a contraction and each row of an embedding. nf4 (Dettmers et al. 2023, arXiv:2305.14314) and int4 have a
float32 scale for each block along the last summed axis, the block's largest magnitude, and two codes in a byte: an eighth of
float32, and 0.5 bit more for the scales of blocks of 64. On a CPU the engine packs int8 weights (`infer.cpu.panels`); 4-bit weights,
and int8 without the compiled kernels, in training, and in `logits` and `score`, are slower than float32 there, because XLA first widens
them.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from argosy.core.errors import BadInput
from argosy.models.parts.einsum import Contraction, Einsum
from argosy.models.parts.weight import Codes, Draw, Meaning
from argosy.ops.native.products import Panels
from argosy.ops.quantized import INT4, NF4, Quantized, packed_pairs, unpacked_shape

Format = Literal["nf4", "int4", "int8"]
LEVELS: dict[str, tuple[float, ...]] = {"nf4": NF4, "int4": INT4}


class QuantizedEinsum(Contraction):
    """An `Einsum` whose weight is a quantized array and is not trained.

    Args:
        of: the contraction it replaces.
        w: its weight, quantized, or only the shapes of that.
        format, block: how `codes` quantizes other values of the weight.
    """

    def __init__(self, of: Einsum, w: Quantized, format: Format = "int8", block: int = 64):
        self.eq, self.legend, self.b, self.several, self.block = of.eq, of.legend, of.b, of.several, block
        self.format: Format = format
        meaning = of.w.get_metadata()["meaning"]
        # Scales have every letter of the weight, and size 1 along shared axes.
        scales = Meaning(meaning.letters, "", meaning.group, meaning.legend)
        self.values = Codes(w.values, meaning=meaning, draw=Draw())
        self.scale = Codes(w.scale, meaning=scales, draw=Draw())
        self.zero = None if w.zero is None else Codes(w.zero, meaning=scales, draw=Draw())
        self.x_scale = None if w.x_scale is None else Codes(w.x_scale, meaning=Meaning(""), draw=Draw())
        self.levels, self.packed = w.levels, w.packed

    @property
    def weight(self) -> Quantized:
        zero = None if self.zero is None else self.zero[...]
        x_scale = None if self.x_scale is None else self.x_scale[...]
        return Quantized(self.values[...], self.scale[...], zero, x_scale, self.levels, self.packed)

    @property
    def shape(self) -> tuple[int, ...]:
        return unpacked_shape(self.values.shape, self.packed)

    def codes(self, w: Any) -> Quantized:
        """Other values of this weight in its format; w may be one layer or one expert of it, on a leading axis of size 1."""
        return _codes(self, w, self.format, self.block)


def int8(of: Contraction) -> QuantizedEinsum:
    """Returns a contraction with its weight in int8.

    Raises:
        BadInput: it is quantized already, or has an adapter.
    """
    return quantized(of, "int8")


def quantized(of: Contraction, format: Format, block: int = 64) -> QuantizedEinsum:
    """Returns a contraction with its weight in a format.

    Args:
        of: its weight may be a description.
        block: most weights that share a scale, in the 4-bit formats.

    Raises:
        BadInput: it is quantized already, or has an adapter.
    """
    if not isinstance(of, Einsum):
        what = "is quantized already" if isinstance(of, QuantizedEinsum) else "has an adapter"
        raise BadInput(f"{format}: {of.eq} {what}", hint="quantize the plain model first, then put adapters on it")
    w = of.w.get_value()
    if isinstance(w, Panels):
        raise BadInput(f"{format}: the weight of {of.eq} is packed for answers alone", hint="load the model without blocks=True")
    if isinstance(w, jax.ShapeDtypeStruct):
        return QuantizedEinsum(of, jax.eval_shape(lambda w: _codes(of, w, format, block), w), format, block)
    return QuantizedEinsum(of, _codes(of, w, format, block), format, block)


def _codes(of: Contraction, w: Any, format: Format, block: int) -> Quantized:
    if format == "int8":
        return _int8(w, tuple(i - len(of.spec) for i, letter in enumerate(of.spec) if letter not in of.scaled))
    axis = max(i for i, letter in enumerate(of.spec) if letter in of.inner) - len(of.spec)
    size = w.shape[axis]
    largest = next(n for n in range(min(block, size), 0, -1) if size % n == 0)
    return _in_blocks(w, axis, largest, LEVELS[format])


@partial(jax.jit, static_argnums=1)
def _int8(w: Float[Array, "..."], shared: tuple[int, ...]) -> Quantized:
    """Quantizes with one scale along the shared axes. Scales are float32, because rounding them too would double the error. A
    channel of zeros gets scale 1."""
    wide = w.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), shared, keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest / 127)
    return Quantized(jnp.round(wide / scale).astype(jnp.int8), scale)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _in_blocks(w: Float[Array, "..."], axis: int, block: int, levels: tuple[float, ...]) -> Quantized:
    """Quantizes to the nearest level of each block along an axis, whose scale is its largest magnitude; 1 for a block of zeros."""
    at = w.ndim + axis
    wide = w.astype(jnp.float32)
    blocks = wide.reshape(*w.shape[:at], -1, block, *w.shape[at + 1 :])
    largest = jnp.max(jnp.abs(blocks), at + 1)
    scale = jnp.where(largest == 0, 1.0, largest)
    codes = _nearest((blocks / jnp.expand_dims(scale, at + 1)).reshape(w.shape), levels)
    packed = axis if w.shape[axis] % 2 == 0 else 0
    return Quantized(packed_pairs(codes, packed) if packed else codes, scale, levels=levels, packed=packed)


def _nearest(x: Float[Array, "..."], levels: tuple[float, ...]) -> UInt8[Array, "..."]:
    """The index of the nearest level: the number of midpoints below x."""
    between = (np.asarray(levels[1:], np.float32) + np.asarray(levels[:-1], np.float32)) / 2
    out = jnp.zeros(x.shape, jnp.uint8)
    for midpoint in between:
        out = out + (x > midpoint).astype(jnp.uint8)
    return out


def is_quantized(model: nnx.Module) -> bool:
    """Whether any contraction of the model is quantized."""
    return any(isinstance(m, QuantizedEinsum) for _, m in nnx.iter_modules(model))
