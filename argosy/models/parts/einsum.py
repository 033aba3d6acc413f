"""Seam 1: contractions of data with weights, dense or grouped.

    Einsum("BTD,DNH->BTNH", dims)     a projection: D is summed, N and H are kept
    Einsum("XD,EDM->XM", dims)        grouped: E is in neither the input nor the output, so a `Route` gives each row's expert

The equation fixes the weight's shape, fan-in, logical axes and bias. It also fixes which channels share a quantization scale, how a
low-rank adapter splits, and which matrix an optimizer sees. LoRA, int8, sharding and Hub names act on contractions from outside
(`adapt.surgery`). This file knows none of them.
"""

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from argosy.core.dims import LOOKED_UP, Legend, named_axes
from argosy.models.parts.weight import Draw, Meaning, SelectionWeight, weight
from argosy.ops.embedding import embedding_rows
from argosy.ops.grouped import grouped_matmul
from argosy.ops.matmul import matmul, with_wide_output
from argosy.ops.native.products import Panels, integer_product, multiplies_integers, product
from argosy.ops.precision import sums_in
from argosy.ops.quantized import Quantized
from argosy.parallel.scope import platform, splits

# The checkpoint name of every product with a weight, by which rematerialization can keep these products.
PRODUCT = "product"


class Route(NamedTuple):
    """The experts of rows that are sorted by expert.

    sizes: the number of rows of each expert.
    expert: the expert of each row.
    even: whether every expert has the same number of rows. This is known when the program is compiled.
    token: the flat index of the token that each row belongs to.
    """

    sizes: Int[Array, "E"]
    expert: Int[Array, "X"]
    even: bool = False
    token: Int[Array, "X"] | None = None


def contract(
    eq: str, x: Float[Array, "..."], w: Any, route: Route | None = None, *, dtype: Any = None
) -> Float[Array, "..."]:
    """Contracts data with a weight. Multiplies in the dtype of `x` and sums in float32 at least.

    Args:
        eq: the equation, such as "BTD,DF->BTF".
        w: an array, a quantized weight (`ops.quantized`), or a packed weight (`ops.native.products`).
        route: the experts of the rows, for a grouped equation such as "XD,EDM->XM".
        dtype: the dtype of the output. Default: that of `x`. A head needs float32: rounded to bfloat16, the best two logits are equal
            for 3 % of tokens.
    """
    dtype = dtype or x.dtype
    activations, x_scale = (w.activations, w.x_scale) if isinstance(w, Quantized) else (None, None)
    panels = w.values if isinstance(w, Quantized) else w
    if isinstance(panels, Panels) and (activations := activations or panels.activations) is not None:
        y = _packed_codes(eq, x, panels, activations, x_scale, route)
    elif isinstance(w, Quantized) and not isinstance(panels, Panels):
        y = _requantized(eq, x, w, route)
    else:
        y = _plain(eq, x, panels, route, dtype)
    return checkpoint_name(y.astype(dtype), PRODUCT)


def _plain(eq: str, x: Array, w: Any, route: Route | None, dtype: Any) -> Array:
    if isinstance(w, Panels):
        if x.dtype == jnp.float32 and _packed_for(eq, w):
            y = product(x.reshape(-1, w.summed), w, None if route is None else route.sizes)
            return y.reshape(*x.shape[: x.ndim - w.inner], *w.kept)
        w = w.dense()
    if route is not None and not route.even:
        return grouped_matmul(x, w, route.sizes)
    w = w.astype(x.dtype)
    if route is not None:
        rows = x.reshape(len(w), -1, x.shape[-1])
        return jnp.einsum("EXD,EDM->EXM", rows, w, preferred_element_type=dtype).reshape(len(x), -1)
    # If batch and time were merged into one axis, they could no longer both be split over devices, and all tokens would be gathered.
    # On TPUs, which store the last two axes in tiles, merging the axes of heads copies the weight (docs/measured.md).
    if (inner := _tail(eq)) is None or ("T" in eq and splits("time")) or platform() == "tpu":
        return with_wide_output(partial(_einsum, eq), x, w, dtype)
    return _product(eq, x, w, inner, dtype)


def _einsum(eq: str, x: Array, w: Array, dtype: Any) -> Array:
    return jnp.einsum(eq, x, w, preferred_element_type=dtype)


def _packed_codes(
    eq: str, x: Array, w: Panels, activations: Any, x_scale: Array | None, route: Route | None
) -> Float[Array, "..."]:
    """Contracts data with a packed weight. The kernels themselves round the data to whole numbers.

    Args:
        activations, x_scale: how the data is rounded, as in `Quantized`.
    """
    lead = x.ndim - w.inner
    if x.dtype == jnp.float32 and _packed_for(eq, w):
        whole = activations.whole_numbers(x.shape[lead:], is_static=x_scale is not None)
        if whole is not None and multiplies_integers(w, whole.scales):
            sizes = None if route is None else route.sizes
            y = integer_product(x.reshape(-1, w.summed), w, whole.bits, whole.scales, x_scale, sizes)
            return y.reshape(*x.shape[:lead], *w.kept)
    letters, spec, out = eq.replace("->", ",").split(",")
    data = activations.quantize(x, tuple(i for i, a in enumerate(letters) if a in spec and a not in out), x_scale)
    return _plain(eq, data.dequantized(x.dtype), replace(w, activations=None), route, x.dtype)


def _requantized(eq: str, x: Array, w: Quantized, route: Route | None) -> Float[Array, "..."]:
    """Contracts data with a quantized weight, which the backward pass dequantizes again. Otherwise the dequantized weights of all
    layers would be kept for the backward pass, and a 4-bit base model would take the memory of float32."""
    return jax.checkpoint(lambda x, w: _quantized(eq, x, w, route))(x, w)


def _quantized(eq: str, x: Array, w: Quantized, route: Route | None) -> Float[Array, "..."]:
    """Contracts data with a quantized weight, in float32 at least.

    Scales along kept letters multiply the output. Scales along summed letters multiply the input. If there are scales along both, or
    along blocks, the weight is dequantized first.
    """
    letters, spec, out = eq.replace("->", ",").split(",")
    scaled_letters, kind = {a for a, n in zip(spec, w.scale.shape) if n > 1}, sums_in(x.dtype)
    in_blocks = any(n not in (1, size) for n, size in zip(w.scale.shape, w.shape))
    group = {a for a in spec if a not in letters + out}

    def along(a: Array, target: str) -> Array:
        """Reshapes a scale so that it multiplies an array with these axes. With a route, selects the scale of each row's expert."""
        a = a.astype(kind)
        if route is None:
            order = "".join(letter for letter in target if letter in spec)
            shared = tuple(i for i, letter in enumerate(spec) if letter not in target)
            ordered = jnp.einsum(f"{''.join(c for c in spec if c in target)}->{order}", jnp.squeeze(a, shared))
            sizes = dict(zip(order, ordered.shape))
            return ordered.reshape([sizes.get(letter, 1) for letter in target])
        shared = tuple(i for i, letter in enumerate(spec) if letter not in target and letter not in group)
        per_expert = jnp.squeeze(a, shared)
        return jnp.broadcast_to(per_expert, (w.shape[0], *per_expert.shape[1:]))[route.expert]

    data, summed = None, tuple(i for i, a in enumerate(letters) if a in spec and a not in out)
    if w.activations is not None:
        data = w.activations.quantize(x, summed, w.x_scale)
    along_outputs, inward = scaled_letters <= set(out) | group, scaled_letters <= set(letters) | group
    separate = not in_blocks and w.is_linear and (along_outputs or (inward and w.minimum is None))
    if data is not None:
        if separate and along_outputs and route is None and w.minimum is None and _multiplies_integers(data, w, summed):
            y = jnp.einsum(eq, data.values, w.values, preferred_element_type=jnp.int32).astype(kind)
            rows = jnp.squeeze(data.scales, [i for i, a in enumerate(letters) if a not in out])
            rest = dict(zip([a for a in letters if a in out], rows.shape))
            return y * rows.astype(kind).reshape([rest.get(a, 1) for a in out]) * along(w.scales, out)
        # The same product in floats. Products of whole numbers are exact, but sums are rounded.
        x = data.dequantized(x.dtype)
    if not separate:
        return _plain(eq, x, w.dequantized(x.dtype), route, kind).astype(kind)
    if not along_outputs:
        x = (x.astype(kind) * along(w.scales, letters)).astype(x.dtype)
        return _plain(eq, x, w.values, route, kind).astype(kind)
    y = _plain(eq, x, w.values, route, kind).astype(kind) * along(w.scales, out)
    if w.minimum is not None:
        summed = jnp.sum(x.astype(kind), [i for i, a in enumerate(letters) if a not in out], keepdims=False)
        rest = "".join(a for a in letters if a in out)
        summed = summed.reshape([dict(zip(rest, summed.shape)).get(a, 1) for a in out])
        y = y - summed * along(w.minimum, out)
    return y


def _multiplies_integers(x: Quantized, w: Quantized, summed: tuple[int, ...]) -> bool:
    """Whether to multiply int8 with int8 on this device. Not on CPUs, where XLA does so ten times slower than float32, and not if the
    data has blocks along the summed axes, each of which would need its own sum."""
    if platform() == "cpu" or x.minimum is not None or any(x.scale.shape[axis] > 1 for axis in summed if x.scale.ndim):
        return False
    return x.values.dtype == w.values.dtype == jnp.int8


def _tail(eq: str) -> str | None:
    """Returns the summed letters if the equation is a matrix product after axes are merged, otherwise None. It is one if x ends in the
    summed letters, the weight begins or ends with them, and the output has the other letters in order."""
    letters, spec, out = eq.replace("->", ",").split(",")
    inner = "".join(a for a in spec if a not in out)
    rest = letters.removesuffix(inner)
    if not inner or rest == letters or set(rest) & set(spec):
        return None
    if spec in (inner + out.removeprefix(rest), out.removeprefix(rest) + inner) and out.startswith(rest):
        return inner
    return None


def _packed_for(eq: str, w: Panels) -> bool:
    """Whether a packed weight has the layout that this equation needs."""
    x, spec, out, _ = letters_of(eq)
    if w.experts:
        spec = "".join(a for a in spec if a in x + out)
    inner = _tail(f"{x},{spec}->{out}")
    return inner is not None and len(inner) == w.inner and spec.startswith(inner) == w.first


def _product(eq: str, x: Array, w: Array, inner: str, dtype: Any) -> Array:
    """Computes the contraction as one matrix product with merged axes. With four axes, XLA:CPU is 15 % slower."""
    _, spec, _ = eq.replace("->", ",").split(",")
    n, first = len(inner), spec.startswith(inner)
    out_shape = w.shape[n:] if first else w.shape[: len(spec) - n]
    size = math.prod(x.shape[-n:])
    flat = w.reshape(size, -1) if first else w.reshape(-1, size)
    y = matmul(x.reshape(-1, size), flat, 1, 0 if first else 1, dtype=dtype)
    return y.reshape(*x.shape[:-n], *out_shape)


class Letters(NamedTuple):
    """The letters of an equation.

    x: the letters of the input.
    spec: the letters of the weight.
    out: the letters of the output.
    inner: the letters of the weight that are summed.
    """

    x: str
    spec: str
    out: str
    inner: str


@lru_cache(maxsize=1024)
def letters_of(eq: str) -> Letters:
    x, spec, out = eq.replace("->", ",").split(",")
    return Letters(x, spec, out, "".join(a for a in spec if a in x and a not in out))


class Contraction(nnx.Module):
    """The interface of `Einsum` and of modules that replace it, such as adapters and quantized weights.

    eq: the equation.
    several: whether the weight is also used with other equations (`via`).
    legend: letters of the equation that stand for other axes than in `core.dims.LEGEND`.
    """

    eq: str
    several: bool = False
    legend: Legend = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the weight's axes."""
        return named_axes(self.spec, self.legend)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The names of the axes that the contraction sums over."""
        return named_axes(self.inner, self.legend)

    @property
    def is_lookup(self) -> bool:
        """Whether rows of the weight are looked up: the embedding of a token, a position or a token type."""
        return bool(self.inner) and set(self.summed_axes) <= LOOKED_UP

    @property
    def weight(self) -> Any:
        """The weight that is contracted: an array, a quantized weight or a packed weight."""
        raise NotImplementedError

    @property
    def bias(self) -> Array | None:
        b = getattr(self, "b", None)
        return None if b is None else b[...]

    def __call__(
        self, x: Float[Array, "..."], route: Route | None = None, *, dtype: Any = None
    ) -> Float[Array, "..."]:
        return self.biased(self.product(x, route, dtype=dtype), route)

    def product(self, x: Float[Array, "..."], route: Route | None = None, *, dtype: Any = None) -> Float[Array, "..."]:
        """Computes the contraction without the bias. Arguments as in `contract`."""
        self.check(route)
        return contract(self.eq, x, self.weight, route, dtype=dtype)

    def before_split(self) -> "Contraction":
        """Returns this contraction after computing what depends on the whole weight. Call it before a `shard_map`, inside of which a
        device sees only its shard of the weight."""
        return self

    def biased(self, y: Float[Array, "..."], route: Route | None = None) -> Float[Array, "..."]:
        """Adds the bias to a product. With a route, adds the bias of each row's expert."""
        if (bias := self.bias) is None:
            return y
        return y + (bias if route is None else bias[route.expert]).astype(y.dtype)

    def via(self, eq: str, x: Float[Array, "..."], *, dtype: Any = None) -> Float[Array, "..."]:
        """Contracts x with the same weight by another equation, as tied embeddings and absorbed latent attention do.

        Raises:
            ValueError: the weight has other letters in `eq` than in the equation of this contraction, or there is a bias.
        """
        self.check_via(eq)
        w = self.weight
        if eq != self.eq and isinstance(w, Quantized) and w.x_scale is not None:
            # `x_scale` was calibrated on the inputs of the first equation.
            w = replace(w, x_scale=None)
        return contract(eq, x, w, dtype=dtype)

    def check_via(self, eq: str) -> None:
        if eq.split(",")[1].split("->")[0] != self.spec:
            raise ValueError(f"{eq}: the letters of this weight are {self.spec}")
        if self.group:
            raise ValueError(f"{eq}: experts are contracted over a route")
        if self.bias is not None:
            raise ValueError(f"{eq}: the bias of {self.eq} does not fit another equation")

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Looks up rows of the weight, as an embedding does."""
        w = self.weight
        return w.rows(ids) if isinstance(w, Quantized | Panels) else embedding_rows(w, self.axes, ids)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight. Stacked layers are a leading axis."""
        return tuple(self.weight.shape)

    @property
    def chooses(self) -> bool:
        """Whether the output only selects something, such as experts or tokens. No gradient flows through such a contraction, so an
        adapter on it would never train."""
        return isinstance(getattr(self, "w", None), SelectionWeight)

    @property
    def x(self) -> str:
        return letters_of(self.eq).x

    @property
    def spec(self) -> str:
        return letters_of(self.eq).spec

    @property
    def out(self) -> str:
        return letters_of(self.eq).out

    @property
    def inner(self) -> str:
        """The letters of the axes that the contraction sums over."""
        return letters_of(self.eq).inner

    @property
    def group(self) -> str:
        """The letter that a route selects, such as E for experts; empty if the equation is not grouped."""
        x, spec, out, _ = letters_of(self.eq)
        return "".join(a for a in spec if a not in x + out)

    @property
    def kept(self) -> str:
        """The letters of the weight that are not summed, in the order of the bias. The letter of `group` is included."""
        _, spec, _, inner = letters_of(self.eq)
        return "".join(a for a in spec if a not in inner)

    @property
    def stacked(self) -> int:
        """The number of leading axes of stacked layers: 1 if the weight holds all layers of a kind, otherwise 0."""
        return len(self.shape) - len(self.spec)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.spec, self.shape[self.stacked :]))

    def check(self, route: Route | None) -> None:
        """Checks that a route is given if and only if the equation is grouped. jnp.einsum would silently sum over all experts.

        Raises:
            ValueError: a grouped equation lacks a route, or another equation has one.
        """
        if bool(self.group) != (route is not None):
            raise ValueError(f"{self.eq} {'needs' if self.group else 'takes no'} route")


class ContractionWrapper(Contraction):
    """A contraction that wraps another one, and has the same weight, bias and shape.

    of: the wrapped contraction.
    """

    of: Contraction

    @property
    def weight(self) -> Any:
        return self.of.weight

    @property
    def bias(self) -> Array | None:
        return self.of.bias

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape


class Einsum(Contraction):
    """A contraction of x with a weight, by an equation.

    Args:
        eq: the equation, such as "BTD,DNH->BTNH". Letters as in `core.dims`.
        dims: the size of each letter of the weight.
        bias: whether a bias is added, with one number for each channel of the output.
        scale: the standard deviation of the initial weight. Default: 1/sqrt(fan-in).
        kind: the class of the weight and the bias. `SelectionWeight` if the output only selects something and is never trained.
        several: whether the weight is also used with other equations (`via`). If so, it is not packed for this equation.
        legend: letters of this equation that stand for other axes than in `core.dims.LEGEND`.
    """

    def __init__(
        self,
        eq: str,
        dims: dict[str, int],
        *,
        bias: bool = False,
        scale: float | None = None,
        kind: type[nnx.Variable] = nnx.Param,
        several: bool = False,
        legend: Legend = (),
    ):
        self.eq, self.several, self.legend = eq, several, legend
        fan_in = math.prod(dims[a] for a in self.inner)
        meaning = Meaning(self.spec, self.inner, self.group, legend)
        draw = Draw("normal", fan_in**-0.5 if scale is None else scale)
        self.w = weight(tuple(dims[a] for a in self.spec), meaning, draw, kind)
        b = tuple(dims[a] for a in self.kept)
        self.b = weight(b, Meaning(self.kept, "", self.group, legend), Draw("constant", 0.0), kind) if bias else None

    @property
    def weight(self) -> Any:
        return self.w[...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)
