"""Low-rank adapters: y = W x + (alpha / rank) B A x. Hu et al. 2021 (arXiv:2106.09685).

The factors follow from the contraction's equation: A has the summed letters, B the kept ones. Grouped weights have an A and a B
for each expert, on the same route. B starts at zero, so the model starts unchanged; W is frozen and may be quantized (QLoRA,
arXiv:2305.14314).
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from argosy.adapt.surgery import at, find, put_at
from argosy.core.errors import BadInput
from argosy.models.parts.einsum import Contraction, Einsum, Route, contract
from argosy.models.parts.weight import Draw, Frozen, Meaning, weight


class LoRA(Contraction):
    """A contraction with an adapter of this rank. The two factors are descriptions until `fill` draws them."""

    def __init__(self, of: Contraction, rank: int, alpha: float):
        if rank < 1:
            raise ValueError(f"rank {rank}")
        self.eq, self.gain = of.eq, alpha / rank
        lead, sizes = of.shape[: of.stacked], of.sizes | {"r": rank}
        outer = "".join(a for a in of.spec if a in of.out)
        a, b = of.group + of.inner + "r", of.group + "r" + outer
        between = "".join(letter for letter in of.x if letter not in of.inner) + "r"
        self.down, self.up = f"{of.x},{a}->{between}", f"{between},{b}->{of.out}"
        fan_in = math.prod(sizes[letter] for letter in of.inner)
        self.of = _frozen(of)
        shape_a, shape_b = ((*lead, *(sizes[letter] for letter in letters)) for letters in (a, b))
        self.a = weight(shape_a, Meaning(a, of.inner, of.group), Draw("normal", fan_in**-0.5), nnx.LoRAParam)
        self.b = weight(shape_b, Meaning(b, "r", of.group), Draw("constant", 0.0), nnx.LoRAParam)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    @property
    def weight(self) -> Any:
        return self.of.weight

    @property
    def bias(self) -> Array | None:
        return self.of.bias

    def product(self, x: Float[Array, "..."], route: Route | None = None, *, dtype: Any = None) -> Float[Array, "..."]:
        low = contract(self.down, x, self.a[...], route)
        return self.of.product(x, route, dtype=dtype) + self.gain * contract(self.up, low, self.b[...], route, dtype=dtype)

    def via(self, eq: str, x: Float[Array, "..."], *, dtype: Any = None) -> Float[Array, "..."]:
        before, out = eq.split("->")
        letters = before.split(",")[0]
        a, b = self.down.split(",")[1].split("->")[0], self.up.split(",")[1].split("->")[0]
        whole = self.of.via(eq, x, dtype=dtype)
        both = jnp.einsum(
            f"{letters},{a},{b}->{out}",
            x,
            self.a[...].astype(x.dtype),
            self.b[...].astype(x.dtype),
            optimize="optimal",
            preferred_element_type=whole.dtype,
        )
        return whole + self.gain * both

    def take(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        return self.of.take(ids) + self.gain * self.a[...][ids] @ self.b[...]

    def merged(self) -> Einsum:
        """The weight with the adapter merged, W + gain A B, added in float32 and kept in the type of W. This module is unchanged.

        Raises:
            ValueError: W is quantized: merging would round the adapter away.
        """
        if not isinstance(self.of, Einsum):
            raise ValueError(f"{self.eq}: the weight under the adapter is {type(self.of).__name__}, not float")
        a, b = self.down.split(",")[1].split("->")[0], self.up.split(",")[1].split("->")[0]
        lead = "L" * self.stacked
        delta = jnp.einsum(f"{lead}{a},{lead}{b}->{lead}{self.spec}", self.a[...], self.b[...])
        of = nnx.merge(*nnx.split(self.of))
        w = (of.w[...].astype(jnp.float32) + self.gain * delta).astype(of.w.dtype)
        of.w = nnx.Param(w, **{k: of.w.get_metadata()[k] for k in ("meaning", "draw")})
        if of.b is not None:
            of.b = nnx.Param(of.b.get_value(), **{k: of.b.get_metadata()[k] for k in ("meaning", "draw")})
        return of


def merge(model: nnx.Module, kept: dict[str, LoRA] | None = None) -> list[str]:
    """Merges every adapter into its weight, one after the other. Returns the names of their contractions.

    Args:
        kept: filled with what was merged, for `unmerge`; without it the unmerged weights are freed.

    Raises:
        BadInput: there is no adapter, or one is on a quantized weight, which would round it away.
    """
    if not any(isinstance(module, LoRA) for _, module in nnx.iter_modules(model)):
        raise BadInput(
            "the model has no adapters", hint="argosy.load(MODEL, adapter=FOLDER), or put some on it: docs/adapters.md"
        )
    found = find(model, ".*", LoRA)
    if quantised := [name for name, adapted in found.items() if not isinstance(adapted.of, Einsum)]:
        raise BadInput(f"adapters on quantized weights cannot be merged: {', '.join(quantised[:4])}")
    names = list(found)
    if kept is not None:
        kept |= found
    # Each is freed once it is merged.
    found.clear()
    for name in names:
        put_at(model, name, at(model, name).merged())
    return names


def unmerge(model: nnx.Module, merged: Mapping[str, LoRA]) -> list[str]:
    """Restores what `merge` kept, bit for bit. Returns the names.

    Raises:
        BadInput: the model has no such contraction, or one of another shape; nothing is changed in this case.
    """
    own = {name: module for name, module in find(model, ".*").items() if name in merged}
    wrong = [name for name, adapted in merged.items() if name not in own or own[name].shape != adapted.shape]
    if wrong:
        hint = "give the model that they were merged into, in the same layout"
        raise BadInput(f"no such contraction, or one of another shape: {', '.join(wrong[:4])}", hint=hint)
    for name, adapted in merged.items():
        put_at(model, name, adapted)
    return list(merged)


def _frozen(of: Contraction) -> Contraction:
    for name in ("w", "b"):
        v = getattr(of, name, None)
        if isinstance(v, nnx.Param):
            setattr(of, name, Frozen(v.get_value(), meaning=v.get_metadata()["meaning"], draw=v.get_metadata()["draw"]))
    return of
