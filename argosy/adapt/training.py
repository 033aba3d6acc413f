"""Low-precision training: contractions that round weights and activations in the forward pass, or also in the backward pass.

Quantization-aware training (QAT; Jacob et al. 2017, arXiv:1712.05877, section 3) computes with the rounded weight Q(w) and the rounded
activations Q(x), and passes gradients straight through the rounding (Bengio et al. 2013, arXiv:1308.3432):

    y = Q(x) Q(w)        dx = dy Q(w)'        dw = Q(x)' dy

Quantized training rounds both factors of all three products (`adapt.low_precision`). Products of routed experts are rounded only in the
forward pass.

The weight stays float32 under its own name, so there is no difference for optimizers, checkpoints and Hub folders.
"""

from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from argosy.adapt.low_precision import KINDS, Kind, Product, by_row, low_precision_product
from argosy.adapt.quant import Scheme
from argosy.adapt.scaling import attach_histories
from argosy.adapt.surgery import find, put_at
from argosy.core.errors import BadInput
from argosy.models.parts.einsum import PRODUCT, Contraction, Einsum, Route, contract, letters_of


class TrainedEinsum(Contraction):
    """An `Einsum` that is trained and computes with rounded factors. Its weight is the float32 weight of the `Einsum`, under the same
    name."""

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
        """Computes the product of activations and weight with rounded factors."""
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
        of: the contraction to train.
        scheme: the scheme by which the contraction will be quantized after training.
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

        # Rounded weights are computed again in the backward pass, so that those of all layers are not kept.
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

    history: the history of delayed scaling in one pass, set by a training step (`adapt.scaling`).
    key: the random key of stochastic rounding in one pass, also set by a training step.

    Args:
        of: the contraction to train.
        kind: the number formats, a key of `KINDS`.
        stochastic: whether a training step rounds gradients stochastically.
    """

    history: Any = None
    key: Any = None

    def __init__(self, of: Einsum, kind: Kind, stochastic: bool = False):
        super().__init__(of)
        self.kind: Kind = kind
        self.stochastic = stochastic

    def contract(self, eq: str, x: Array, route: Route | None, dtype: Any) -> Array:
        if route is not None:
            name = KINDS[self.kind][0]
            summed = tuple(i for i, letter in enumerate(letters_of(eq).x) if letter in letters_of(eq).inner)
            x = _straight_through(lambda x: by_row(name, x, summed).dequantized(x.dtype), x)
            w = _straight_through(lambda w: Scheme(name, "channel").quantize(self, w).dequantized(w.dtype), self.w[...])
            return contract(eq, x, w, route, dtype=dtype)
        history, key = (None if part is None else part[...] for part in (self.history, self.key))
        y: Array = low_precision_product(Product(eq, self.kind), x, self.w[...].astype(x.dtype), history, key)
        return checkpoint_name(y.astype(dtype or x.dtype), PRODUCT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _straight_through(rounded: Any, x: Array) -> Array:
    return rounded(x)


_straight_through.defvjp(lambda rounded, x: (rounded(x), None), lambda rounded, _, g: (g,))


def train_in_few_bits(model: nnx.Module, where: str, kind: Kind, *, stochastic: bool = False, history: int = 0) -> list[str]:
    """Replaces the matching contractions of a model, in place, by contractions that train in low precision. Returns the names, at least
    one.

    Args:
        where: the pattern of the names (`adapt.surgery`).
        kind: the number formats, int8 or fp8.
        stochastic: whether training steps round gradients stochastically. For int8 only.
        history: the number of steps that delayed scaling looks back. 0 uses dynamic scales.

    Raises:
        BadInput: nothing matches, or a contraction has an adapter or is quantized.
    """
    make = partial(LowPrecisionEinsum, kind=kind, stochastic=stochastic)
    names = _put(model, dict.fromkeys(find(model, where), make), kind)
    if history:
        attach_histories(model, names, history)
    return names


def train_quantization_aware(model: nnx.Module, schemes: dict[str, Scheme]) -> list[str]:
    """Replaces contractions of a model, in place, by contractions of quantization-aware training. Returns the names.

    Args:
        schemes: the scheme of each contraction, by its name in the model's layout.

    Raises:
        BadInput: a contraction has an adapter or is quantized.
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
