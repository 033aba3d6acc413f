"""Int8 weights from outside: one scale for each kept channel, so the scale multiplies the output.

Symmetric, round to nearest (Jacob et al. 2017, arXiv:1712.05877, section 2, without zero points). A quarter of the bytes of
float32; on a CPU slower than float32 (XLA widens the weight first), so it is for memory there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy.models.parts.einsum import Contraction, Einsum, Route, contract
from argosy.models.parts.weight import Draw, Frozen, Meaning


class Int8(Contraction):
    """An `Einsum` whose weight is int8 and frozen. Experts have scales of their own: E is a kept letter."""

    def __init__(self, of: Einsum):
        self.eq = of.eq
        w = of.w.get_value()
        axes = tuple(of.stacked + i for i, letter in enumerate(of.spec) if letter in of.inner)
        quantise = jax.eval_shape if isinstance(w, jax.ShapeDtypeStruct) else (lambda f, *a: f(*a))
        q, scale = quantise(lambda w: _quantise(w, axes), w)
        self.q = Frozen(q, meaning=of.w.get_metadata()["meaning"], draw=Draw())
        self.scale = Frozen(scale, meaning=Meaning(of.kept, "", of.group), draw=Draw())
        self.b = of.b

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.q.shape)

    def __call__(self, x: Float[Array, "..."], route: Route | None = None) -> Float[Array, "..."]:
        self.check(route)
        scale = self.scale[...] if route is None else self.scale[...][route.expert]
        y = contract(self.eq, x, self.q[...], route) * scale.astype(x.dtype)
        if self.b is None:
            return y
        return y + (self.b[...] if route is None else self.b[...][route.expert]).astype(y.dtype)

    def via(self, eq: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The scale lies on letters that this equation may sum over: then it multiplies x, else y."""
        before, out = eq.split("->")
        letters = before.split(",")[0]
        if set(self.kept) <= set(out):
            return contract(eq, x, self.q[...]) * self._along(out).astype(x.dtype)
        if set(self.kept) <= set(letters):
            return contract(eq, x * self._along(letters).astype(x.dtype), self.q[...])
        raise ValueError(f"{eq}: the scale of {self.eq} lies on {self.kept}, in neither side")

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        return self.q[...][ids].astype(self.scale.dtype) * self.scale[...]

    def _along(self, letters: str) -> Array:
        """The scale, shaped to multiply an array with these axes."""
        order = "".join(a for a in letters if a in self.kept)
        shape = [self.sizes[a] if a in self.kept else 1 for a in letters]
        return jnp.einsum(f"{self.kept}->{order}", self.scale[...]).reshape(shape)


def _quantise(w: Float[Array, "..."], axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Int8 values and the scale of each channel. A channel of zeros gets scale 1."""
    largest = jnp.max(jnp.abs(w), axes, keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest / 127)
    return jnp.round(w / scale).astype(jnp.int8), jnp.squeeze(scale, axes)
