"""Matrix products whose factors are rounded to eight bits, in the forward and in the backward pass.

    y = Q(x) Q(w)        dx = Q(dy) Q(w)'     dw = Q(x)' Q(dy)

int8 uses int8 for all factors, as do SwitchBack and AQT (arXiv:2304.13013, arXiv:2105.03536). fp8 uses e4m3 for weights and
activations, and e5m2, which has a wider range, for gradients (arXiv:2209.05433, section 3.2). There are two kinds of scales:

    dynamic     one for each row over the summed axes, from its largest magnitude in this step
    delayed     one for a tensor, from its largest magnitude in the last steps (`AmaxHistory`), so that rounding does not wait for a
                reduction over the tensor (arXiv:2209.05433, section 4.1; the recipe of NVIDIA's Transformer Engine)

Gradients in int8 may be rounded stochastically. They are rounded up with a probability equal to the fraction, so that the rounded
gradient is unbiased (Gupta et al. 2015, arXiv:1502.02551, section 3). Weights and activations are always rounded to nearest.

As in Transformer Engine, a tensor without a history has the scale 1 in the first step, and numbers beyond the range saturate. Unlike
there, a magnitude that is not finite is not stored in the history.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.adapt.formats.format import Limits
from argosy.adapt.formats.table import FORMATS
from argosy.ops.precision import sums_in
from argosy.ops.quantized import Quantized
from argosy.parallel.scope import platform

# The format of weights and activations, and the format of gradients.
KINDS: dict[str, tuple[str, str]] = {"int8": ("int8", "int8"), "fp8": ("fp8_e4m3", "fp8_e5m2")}
# The indices of the rows of a history.
DATA, WEIGHT, GRADIENT = range(3)
# Folded into the random key of a gradient, for each of its two products.
FOR_DATA, FOR_WEIGHT = range(2)

Kind = Literal["int8", "fp8"]


class Product(NamedTuple):
    """The static description of a contraction's products. It is hashable.

    eq: the equation of an einsum of two factors. Each letter of a factor must be in the other factor or in the output.
    kind: the number formats, a key of `KINDS`.
    """

    eq: str
    kind: Kind

    @property
    def sides(self) -> tuple[str, str, str]:
        """The letters of the activations, of the weight and of the output."""
        before, out = self.eq.split("->")
        a, b = before.split(",")
        return a, b, out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def low_precision_product(
    of: Product, x: Float[Array, "..."], w: Float[Array, "..."], history: Array | None = None, key: Array | None = None
) -> Float[Array, "..."]:
    """Computes an einsum whose forward and backward products have factors of eight bits. Sums are float32 or wider.

    Args:
        of: the equation and the number formats.
        x, w: the activations and the weight.
        history: the largest magnitudes of activations, weight and gradient in the last steps [3, H], newest first. None uses dynamic
            scales. The "gradient" with respect to it holds the magnitudes of this step in its first column.
        key: the data of a random key for stochastic rounding of the gradient. None rounds to nearest.
    """
    name = KINDS[of.kind][0]
    a, b, out = of.sides
    return _product(of.eq, _rounded(name, x, a, out, history, DATA), _rounded(name, w, b, out, history, WEIGHT), x.dtype)


def _forward(of: Product, x: Array, w: Array, history: Array | None, key: Array | None) -> tuple[Array, tuple[Any, ...]]:
    return low_precision_product(of, x, w, history, key), (x, w, history, key)


def _backward(of: Product, saved: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    x, w, history, key = saved
    forward, backward = KINDS[of.kind]
    a, b, out = of.sides
    noise = [None if key is None else jax.random.fold_in(jax.random.wrap_key_data(key), i) for i in (FOR_DATA, FOR_WEIGHT)]
    to_x, to_w = f"{out},{b}->{a}", f"{a},{out}->{b}"
    dx = _product(
        to_x, _rounded(backward, g, out, a, history, GRADIENT, noise[FOR_DATA]), _rounded(forward, w, b, a, history, WEIGHT), g.dtype
    )
    dw = _product(
        to_w, _rounded(forward, x, a, b, history, DATA), _rounded(backward, g, out, b, history, GRADIENT, noise[FOR_WEIGHT]), g.dtype
    )
    seen = None if history is None else jnp.zeros_like(history).at[:, 0].set(jnp.stack([_largest(x), _largest(w), _largest(g)]))
    return dx.astype(x.dtype), dw.astype(w.dtype), seen, None


low_precision_product.defvjp(_forward, _backward)


def _largest(x: Array) -> Array:
    """Returns the largest magnitude as float32; 0 if it is not finite."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    return jnp.where(jnp.isfinite(largest), largest, 0.0)


def _rounded(
    name: str, x: Array, letters: str, out: str, history: Array | None, row: int, key: Array | None = None
) -> tuple[str, Quantized]:
    """Rounds a factor of a product. Returns (letters of the factor, rounded factor).

    Args:
        name: the number format.
        letters, out: the letters of the factor and of the output.
        history, row: the history, and the row of this factor in it. None uses dynamic scales.
        key: the random key of stochastic rounding.
    """
    format = FORMATS[name]
    if history is not None:
        before = jnp.max(history[row])
        high = jnp.where(before > 0, before, format.largest).reshape((1,) * x.ndim)
        return letters, format.rounded(x, x.shape, Limits(high))
    summed = [i for i, letter in enumerate(letters) if letter not in out]
    if key is None:
        return letters, by_row(name, x, summed)
    return letters, _stochastic(x, summed, key)


def by_row(name: str, x: Array, summed: Sequence[int]) -> Quantized:
    """Rounds an array to nearest, with one scale for each row over the summed axes."""
    return FORMATS[name].quantize(x, tuple(size if i in summed else 1 for i, size in enumerate(x.shape)))


def _stochastic(x: Array, summed: Sequence[int], key: Array) -> Quantized:
    """Rounds an array stochastically to int8, with one scale for each row over the summed axes. Each number is rounded up with a
    probability equal to its fraction. The largest magnitude becomes 127, so that nothing is clipped, which would cause a bias."""
    x = x.astype(jnp.float32)
    high = jnp.max(jnp.abs(x), summed, keepdims=True)
    scale = jnp.where(high > 0, high / 127, 1.0)
    values = jnp.floor(x / scale + jax.random.uniform(key, x.shape))
    # 127 / 127 may round to more than 127, and the noise is below 1.
    return Quantized(jnp.clip(values, -127, 127).astype(jnp.int8), jnp.where(jnp.isfinite(high), scale, jnp.nan))


def _product(eq: str, a: tuple[str, Quantized], b: tuple[str, Quantized], dtype: Any) -> Array:
    """Computes the product of two rounded factors, with 8-bit matrix units where the compiler supports them."""
    out, kind = eq.split("->")[1], sums_in(dtype)
    (own_a, x), (own_b, y) = a, b
    if platform() == "cpu":
        # The same numbers as floats, because XLA:CPU has no fast products of eight bits.
        z = jnp.einsum(eq, x.values.astype(kind), y.values.astype(kind), preferred_element_type=kind)
    elif x.values.dtype == jnp.int8:
        z = jnp.einsum(eq, x.values, y.values, preferred_element_type=jnp.int32).astype(kind)
    else:
        z = _dot_general(eq, x.values, y.values, kind)
    for letters, factor in ((own_a, x), (own_b, y)):
        if factor.scale.size == 1:
            z = z * factor.scales.reshape(()).astype(kind)
            continue
        out_letters = [letter for letter in letters if letter in out]
        scale = jnp.squeeze(factor.scales, [i for i, letter in enumerate(letters) if letter not in out])
        scale = jnp.transpose(scale, sorted(range(len(out_letters)), key=lambda i: out.index(out_letters[i])))
        sizes = dict(zip(sorted(out_letters, key=out.index), scale.shape, strict=True))
        z = z * scale.reshape([sizes.get(letter, 1) for letter in out]).astype(kind)
    return z


def _dot_general(eq: str, a: Array, b: Array, kind: Any) -> Array:
    """Computes an einsum of factors of two types, such as e4m3 and e5m2, which `jnp.einsum` would first convert to one type."""
    before, out = eq.split("->")
    own_a, own_b = before.split(",")
    summed = [letter for letter in own_a if letter in own_b and letter not in out]
    batch = [letter for letter in own_a if letter in own_b and letter in out]
    places = [[letters.index(letter) for letter in some] for some in (summed, batch) for letters in (own_a, own_b)]
    numbers = ((places[0], places[1]), (places[2], places[3]))
    y = jax.lax.dot_general(a, b, numbers, preferred_element_type=kind)
    order = [*batch, *(c for c in own_a if c in out and c not in batch), *(c for c in own_b if c in out and c not in batch)]
    return jnp.transpose(y, [order.index(letter) for letter in out])
