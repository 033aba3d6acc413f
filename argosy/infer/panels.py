"""The weights of a model, packed for the small products of decoding on a CPU (`ops.native.products`).

A serving engine is the only user of its model, so there each weight is packed in place, and memory holds it once. Elsewhere packed
weights are a copy, made only if it takes at most a quarter of the free memory.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from argosy.adapt.quant import QuantizedEinsum
from argosy.core.dims import LOOKED_UP
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.weight import Leaves
from argosy.observe.environment import memory_bytes
from argosy.ops.native import library
from argosy.ops.native.products import SMALLEST, Panels, packed
from argosy.ops.quantized import Quantized

# The most of the free memory that a copy may take.
SHARE = 0.25

# Takes the place of a weight, by address.
Replace = Callable[[str, Panels], None]


class Packs:
    """The packed weights of one model.

    Args:
        model: unrolled.
        replace: called with each packed weight, so that nothing else need hold the weight itself; None: they are copies.
    """

    def __init__(self, model: nnx.Module, replace: Replace | None = None):
        self.forms, self.replace = forms_of(model), replace
        self._made: Leaves = {}

    def of(self, weights: Leaves) -> Leaves:
        """The weights, packed where that helps, until `forget` the same ones. Takes what it packs out of `weights`."""
        if not self._made:
            chosen = {address: form for address, form in self.forms.items() if suits(weights.get(address))}
            if self.replace is None and not has_room(weights[address] for address in chosen):
                chosen = {}
            for address, form in chosen.items():
                self._made[address] = packed(weights.pop(address), *form)
                if self.replace is not None:
                    self.replace(address, self._made[address])
        return weights | self._made

    def forget(self) -> None:
        """Frees the packed weights, because the weights have changed."""
        self._made = {}


def packs_of(model: Any, replace: Replace | None = None) -> Packs | None:
    """What packs the weights of a model; None if it does not compute in float32, or there are no kernels for packed weights."""
    return None if model.dtype != jnp.float32 or library.unavailable() else Packs(model, replace)


def forms_of(model: nnx.Module) -> dict[str, tuple[int, bool]]:
    """`{address of a weight: (inner, first)}`, as in `Panels`, of the weights that are matrices of a product.

    An embedding is packed for its use as a head, if there is no other head. Experts are not packed, because their products are grouped,
    nor what several equations contract (latent attention).
    """
    out: dict[str, tuple[int, bool]] = {}
    for path, node in nnx.iter_modules(model):
        if not isinstance(node, Einsum | QuantizedEinsum) or node.group or node.stacked or node.several:
            continue
        summed = node.inner
        if set(summed) & LOOKED_UP:
            if node is not getattr(model, "embed", None) or getattr(model, "head", None) is not None:
                continue
            summed = node.kept
        rest = "".join(letter for letter in node.spec if letter not in summed)
        if summed and rest and node.spec in (summed + rest, rest + summed):
            own = "w" if isinstance(node, Einsum) else "values"
            if isinstance(node, Einsum) or scaled_along(node, node.spec) <= set(rest):
                out[".".join(map(str, (*path, own)))] = len(summed), node.spec.startswith(summed)
    return out


def scaled_along(w: Quantized | QuantizedEinsum, letters: str) -> set[str]:
    """The letters of a quantized weight that have scales, in blocks or not."""
    return {letter for letter, n in zip(letters, w.scale.shape, strict=True) if n > 1}


def suits(w: Any) -> bool:
    """Whether packing a weight is worth it, and possible."""
    return isinstance(w, jax.Array) and w.dtype in (jnp.float32, jnp.bfloat16, jnp.int8) and w.size >= SMALLEST


def has_room(weights: Any) -> bool:
    """Whether there is memory for a copy of these weights."""
    free = memory_bytes()[1]
    return free is not None and sum(math.prod(a.shape) * a.dtype.itemsize for a in weights) <= SHARE * free
