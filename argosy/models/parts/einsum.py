"""Seam 1: every weight contraction, dense or grouped.

    Einsum("BTD,DNH->BTNH", dims)     a projection: D is summed, N and H are kept
    Einsum("XD,EDM->XM", dims)        a grouped one: E is in neither side, so each row chooses by its `Route`

The equation fixes the weight's shape, fan-in, logical axes, bias, the channels that share a quantisation scale, how a
low-rank adapter splits, and which matrix an optimizer sees. LoRA, int8, sharding and Hub names act on it from outside
(`adapt.surgery`); this file knows of none of them.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Real

from argosy.models.parts.weight import Choosing, Draw, Meaning, weight
from argosy.ops.grouped import grouped_matmul


class Route(NamedTuple):
    """Rows sorted by expert: how many rows each expert has, and which expert each row has.

    even: every expert has the same number, known from the shape.
    """

    sizes: Int[Array, "E"]
    expert: Int[Array, "X"]
    even: bool = False


def contract(eq: str, x: Float[Array, "..."], w: Real[Array, "..."], route: Route | None = None) -> Float[Array, "..."]:
    """The one place where a weight meets data; it is computed in the type of `x`."""
    if route is not None and not route.even:
        return grouped_matmul(x, w, route.sizes)
    w = w.astype(x.dtype)
    if route is not None:
        return jnp.einsum("EXD,EDM->EXM", x.reshape(len(w), -1, x.shape[-1]), w).reshape(len(x), -1)
    if (inner := _tail(eq)) is None:
        return jnp.einsum(eq, x, w)
    return _product(eq, x, w, inner)


def _tail(eq: str) -> str | None:
    """The summed letters, if the equation is a product of two matrices once axes are merged: x ends in them, the weight
    begins or ends with them, and the output is what is left, in order."""
    letters, spec, out = eq.replace("->", ",").split(",")
    inner = "".join(a for a in spec if a not in out)
    rest = letters.removesuffix(inner)
    if not inner or rest == letters or set(rest) & set(spec):
        return None
    if spec in (inner + out.removeprefix(rest), out.removeprefix(rest) + inner) and out.startswith(rest):
        return inner
    return None


def _product(eq: str, x: Array, w: Array, inner: str) -> Array:
    """As one matrix product, axes merged: XLA:CPU runs the same contraction with four axes 15 % slower."""
    _, spec, _ = eq.replace("->", ",").split(",")
    n, first = len(inner), spec.startswith(inner)
    kept = w.shape[n:] if first else w.shape[: len(spec) - n]
    size = math.prod(x.shape[-n:])
    flat = w.reshape(size, -1) if first else w.reshape(-1, size)
    y = jax.lax.dot_general(x.reshape(-1, size), flat, (((1,), (0 if first else 1,)), ((), ())))
    return y.reshape(*x.shape[:-n], *kept)


class Contraction(nnx.Module):
    """What `Einsum` and everything swapped in its place answers: `__call__`, `via`, and the letters of the equation."""

    eq: str

    def __call__(self, x: Float[Array, "..."], route: Route | None = None) -> Float[Array, "..."]:
        raise NotImplementedError

    def via(self, eq: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The same weight under another equation: a tied head, latent attention absorbed."""
        raise NotImplementedError

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Rows of the weight: the lookup of words."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, the leading axis of stacked layers included."""
        raise NotImplementedError

    @property
    def chooses(self) -> bool:
        """Only a choice follows from it: an adapter on it would never move."""
        return isinstance(getattr(self, "w", None), Choosing)

    @property
    def x(self) -> str:
        return self.eq.split(",")[0]

    @property
    def spec(self) -> str:
        return self.eq.split(",")[1].split("->")[0]

    @property
    def out(self) -> str:
        return self.eq.split("->")[1]

    @property
    def inner(self) -> str:
        """Summed over."""
        return "".join(a for a in self.spec if a in self.x and a not in self.out)

    @property
    def group(self) -> str:
        """Chosen by the route."""
        return "".join(a for a in self.spec if a not in self.x + self.out)

    @property
    def kept(self) -> str:
        """The channels that share a bias and a quantisation scale; those of each group apart."""
        return "".join(a for a in self.spec if a not in self.inner)

    @property
    def stacked(self) -> int:
        """1 where the weight holds all layers of a kind on a leading axis, else 0."""
        return len(self.shape) - len(self.spec)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.spec, self.shape[self.stacked :]))

    def check(self, route: Route | None) -> None:
        """jnp.einsum would sum over all experts in silence."""
        if bool(self.group) != (route is not None):
            raise ValueError(f"{self.eq} {'needs' if self.group else 'takes no'} route")


class Einsum(Contraction):
    """x times w by an equation.

    Args:
        eq: such as "BTD,DNH->BTNH"; letters as in `core.dims`.
        dims: the size of each letter of the weight.
        bias: one number for each kept channel.
        scale: standard deviation at the start; 1/sqrt(fan-in) unless told.
        kind: of its variables: `Choosing` where only a choice follows from it.
    """

    def __init__(
        self,
        eq: str,
        dims: dict[str, int],
        *,
        bias: bool = False,
        scale: float | None = None,
        kind: type[nnx.Variable] = nnx.Param,
    ):
        self.eq = eq
        fan_in = math.prod(dims[a] for a in self.inner)
        meaning = Meaning(self.spec, self.inner, self.group)
        draw = Draw("normal", fan_in**-0.5 if scale is None else scale)
        self.w = weight(tuple(dims[a] for a in self.spec), meaning, draw, kind)
        b = tuple(dims[a] for a in self.kept)
        self.b = weight(b, Meaning(self.kept, "", self.group), Draw("constant", 0.0), kind) if bias else None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)

    def __call__(self, x: Float[Array, "..."], route: Route | None = None) -> Float[Array, "..."]:
        self.check(route)
        y = contract(self.eq, x, self.w[...], route)
        if self.b is None:
            return y
        return y + (self.b[...] if route is None else self.b[...][route.expert]).astype(y.dtype)

    def via(self, eq: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return contract(eq, x, self.w[...])

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        return self.w[...][ids]
