"""Training in few bits: contractions that round weights and data in the forward pass, or also in the backward pass.

Quantization-aware training (QAT; Jacob et al. 2017, arXiv:1712.05877, section 3) computes with the rounded weight Q(w) and the rounded
data Q(x), and passes gradients straight through the rounding (Bengio et al. 2013, arXiv:1308.3432):

    y = Q(x) Q(w)        dx = dy Q(w)'        dw = Q(x)' dy

Quantized training rounds both factors of all three products, each with one scale for each row of what is summed over, from its
largest magnitude in this step (dynamic scaling):

    y = Q(x) Q(w)        dx = Q(dy) Q(w)'     dw = Q(x)' Q(dy)

int8 uses int8 in all of them (SwitchBack and AQT do likewise; arXiv:2304.13013, arXiv:2105.03536); fp8 uses e4m3 for weights and data,
and e5m2, which has the wider range, for gradients (arXiv:2209.05433, section 3.2). Scales from earlier steps (delayed scaling) and
stochastic rounding are not built. The products of experts over a route round in the forward pass alone.

The weight stays float32 at its own address, so optimizers, checkpoints and Hub folders do not see the difference.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from argosy.adapt.formats.table import FORMATS
from argosy.adapt.quant import Scheme
from argosy.adapt.surgery import find, put_at
from argosy.core.errors import BadInput
from argosy.models.parts.einsum import PRODUCT, Contraction, Einsum, Route, contract, letters_of
from argosy.ops.precision import sums_in
from argosy.ops.quantized import Quantized
from argosy.parallel.scope import platform

# The formats of weights and data, and of gradients.
KINDS: dict[str, tuple[str, str]] = {"int8": ("int8", "int8"), "fp8": ("fp8_e4m3", "fp8_e5m2")}


class TrainedEinsum(Contraction):
    """An `Einsum` that computes in few bits and is trained. Its weight is the float32 one, under the same name."""

    w: nnx.Variable
    b: nnx.Variable | None

    def __init__(self, of: Einsum):
        self.eq, self.legend, self.several, self.w, self.b = of.eq, of.legend, of.several, of.w, of.b

    @property
    def weight(self) -> Any:
        return self.w[...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)

    def contract(self, eq: str, x: Array, route: Route | None, dtype: Any) -> Array:
        """The product of data with the weight, in few bits."""
        raise NotImplementedError

    def product(self, x: Float[Array, "..."], route: Route | None = None, *, dtype: Any = None) -> Float[Array, "..."]:
        self.check(route)
        return self.contract(self.eq, x, route, dtype)

    def via(self, eq: str, x: Float[Array, "..."], *, dtype: Any = None) -> Float[Array, "..."]:
        self.check_via(eq)
        return self.contract(eq, x, None, dtype)


class FakeQuantEinsum(TrainedEinsum):
    """Quantization-aware training of one contraction.

    Args:
        scheme: how it will be quantized.
    """

    def __init__(self, of: Einsum, scheme: Scheme):
        super().__init__(of)
        self.scheme = scheme

    @property
    def weight(self) -> Any:
        return _straight_through(lambda w: self.scheme.quantize(self, w).dequantized(w.dtype), self.w[...])

    def contract(self, eq: str, x: Array, route: Route | None, dtype: Any) -> Array:
        letters = letters_of(eq)
        summed = tuple(i for i, letter in enumerate(letters.x) if letter in letters.inner)
        rounding = self.scheme.rounding()

        # The rounded weights of all layers are not kept from the forward pass to the backward pass.
        @jax.checkpoint
        def product(x: Array, w: Array) -> Array:
            w = _straight_through(lambda w: self.scheme.quantize(self, w).dequantized(w.dtype), w)
            if rounding is not None:
                x = _straight_through(lambda x, rounding=rounding: rounding.quantize(x, summed).dequantized(x.dtype), x)
            return contract(eq, x, w, route, dtype=dtype)

        return product(x, self.w[...])

    def take(self, ids: Array) -> Array:
        return self.weight[ids]


class LowPrecisionEinsum(TrainedEinsum):
    """Quantized training of one contraction.

    Args:
        kind: a key of `KINDS`.
    """

    def __init__(self, of: Einsum, kind: Literal["int8", "fp8"]):
        super().__init__(of)
        self.kind: Literal["int8", "fp8"] = kind

    def contract(self, eq: str, x: Array, route: Route | None, dtype: Any) -> Array:
        if route is not None:
            name = KINDS[self.kind][0]
            summed = tuple(i for i, letter in enumerate(letters_of(eq).x) if letter in letters_of(eq).inner)
            x = _straight_through(lambda x: _by_row(name, x, summed).dequantized(x.dtype), x)
            w = _straight_through(lambda w: Scheme(name, "channel").quantize(self, w).dequantized(w.dtype), self.w[...])
            return contract(eq, x, w, route, dtype=dtype)
        y: Array = low_precision_product(eq, self.kind, x, self.w[...].astype(x.dtype))
        return checkpoint_name(y.astype(dtype or x.dtype), PRODUCT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _straight_through(rounded: Any, x: Array) -> Array:
    return rounded(x)


_straight_through.defvjp(lambda rounded, x: (rounded(x), None), lambda rounded, _, g: (g,))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def low_precision_product(eq: str, kind: str, x: Float[Array, "..."], w: Float[Array, "..."]) -> Float[Array, "..."]:
    """An einsum whose forward and backward products are computed in eight bits; sums in float32 at least.

    Args:
        eq: of two factors, each of whose letters is in the other or in the output.
        kind: a key of `KINDS`.
    """
    return _product(eq, x, w, KINDS[kind][0], KINDS[kind][0])


def _forward(eq: str, kind: str, x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return low_precision_product(eq, kind, x, w), (x, w)


def _backward(eq: str, kind: str, factors: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    (x, w), (forward, backward) = factors, KINDS[kind]
    before, out = eq.split("->")
    a, b = before.split(",")
    dx = _product(f"{out},{b}->{a}", g, w, backward, forward)
    dw = _product(f"{a},{out}->{b}", x, g, forward, backward)
    return dx.astype(x.dtype), dw.astype(w.dtype)


low_precision_product.defvjp(_forward, _backward)


def _product(eq: str, a: Array, b: Array, format_a: str, format_b: str) -> Array:
    before, out = eq.split("->")
    letters = before.split(",")
    kind = sums_in(a.dtype)
    rounded = [
        _by_row(format, factor, [i for i, letter in enumerate(own) if letter not in out])
        for own, factor, format in zip(letters, (a, b), (format_a, format_b), strict=True)
    ]
    values = [one.values for one in rounded]
    if values[0].dtype == jnp.int8 and platform() != "cpu":
        y = jnp.einsum(eq, *values, preferred_element_type=jnp.int32).astype(kind)
    elif platform() == "cpu" or values[0].dtype == jnp.int8:
        # The same numbers as floats: XLA:CPU has no fast products of eight bits.
        y = jnp.einsum(eq, *(v.astype(kind) for v in values), preferred_element_type=kind)
    else:
        y = jnp.einsum(eq, *values, preferred_element_type=kind)
    for own, one in zip(letters, rounded, strict=True):
        kept = [letter for letter in own if letter in out]
        scale = jnp.squeeze(one.scales, [i for i, letter in enumerate(own) if letter not in out])
        scale = jnp.transpose(scale, sorted(range(len(kept)), key=lambda i: out.index(kept[i])))
        sizes = dict(zip(sorted(kept, key=out.index), scale.shape, strict=True))
        y = y * scale.reshape([sizes.get(letter, 1) for letter in out]).astype(kind)
    return y


def _by_row(format: str, x: Array, summed: Sequence[int]) -> Quantized:
    return FORMATS[format].quantize(x, tuple(size if i in summed else 1 for i, size in enumerate(x.shape)))


def train_in_few_bits(model: nnx.Module, where: str, kind: Literal["int8", "fp8"]) -> list[str]:
    """Puts quantized training on the contractions that match. Returns their names, at least one.

    Raises:
        BadInput: nothing matches, or one has an adapter or is quantized.
    """
    return _put(model, {name: partial(LowPrecisionEinsum, kind=kind) for name in find(model, where)}, kind)


def train_quantization_aware(model: nnx.Module, schemes: dict[str, Scheme]) -> list[str]:
    """Puts quantization-aware training on contractions, by their names in the model's layout. Returns the names.

    Raises:
        BadInput: one has an adapter or is quantized.
    """
    return _put(model, {name: partial(FakeQuantEinsum, scheme=scheme) for name, scheme in schemes.items()}, "qat")


def _put(model: nnx.Module, make: dict[str, Any], kind: str) -> list[str]:
    for name, of in find(model, ".*").items():
        if name not in make:
            continue
        if not isinstance(of, Einsum):
            hint = "quant.train needs a model whose weights are all trained: adapter=none, and a model of floats"
            raise BadInput(f"quant.train={kind}: {name} has an adapter or is quantized", hint=hint)
        put_at(model, name, make[name](of))
    return list(make)
