"""Reshapes the weight of a contraction to matrices [G I O]: experts, summed letters, kept letters."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.adapt.formats.format import Weight
from argosy.models.parts.einsum import Contraction


def as_matrices(of: Contraction, w: Weight) -> Any:
    """Reshapes the weight of one layer to matrices [G I O]. G is 1 without experts. A numpy array stays a numpy array."""
    sizes = dict(zip(of.spec, w.shape, strict=True))
    groups, inputs, outputs = _letters(of)
    order = [of.spec.index(letter) for letter in groups + inputs + outputs]
    shape = [math.prod(sizes[letter] for letter in letters) for letters in (groups, inputs, outputs)]
    return (np if isinstance(w, np.ndarray) else jnp).transpose(w, order).reshape(shape)


def from_matrices(of: Contraction, m: Float[Array | np.ndarray, "G I O"], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Reshapes matrices [G I O] to a weight of this shape, the inverse of `as_matrices`."""
    sizes, order = dict(zip(of.spec, shape, strict=True)), "".join(_letters(of))
    return jnp.transpose(m.reshape([sizes[letter] for letter in order]), [order.index(letter) for letter in of.spec])


def along_inputs(of: Contraction, a: Float[Array | np.ndarray, "G I"], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Reshapes numbers of input channels to the axes of a weight of this shape, with size 1 along kept letters."""
    sizes = dict(zip(of.spec, shape, strict=True)) | dict.fromkeys(_letters(of)[2], 1)
    return from_matrices(of, a[..., None], tuple(sizes[letter] for letter in of.spec))


def along_outputs(of: Contraction, a: Float[Array | np.ndarray, "G O"], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Reshapes numbers of output channels to the axes of a weight of this shape, with size 1 along summed letters."""
    sizes = dict(zip(of.spec, shape, strict=True)) | dict.fromkeys(of.inner, 1)
    return from_matrices(of, a[:, None], tuple(sizes[letter] for letter in of.spec))


def _letters(of: Contraction) -> tuple[str, str, str]:
    """Returns the letters of experts, of input channels and of output channels, in the order of the weight."""
    return of.group, of.inner, "".join(letter for letter in of.spec if letter not in of.inner + of.group)
