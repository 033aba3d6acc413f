"""Computes statistics of the inputs of contractions.

An `ObservedContraction` computes like the contraction that it replaces, and adds sums over its inputs to a `StatisticsRecorder` while a
program is traced. The sums are X'X, the sum of |x|, the largest |x| and the number of tokens, for each expert over its own tokens.
Contractions that read the same array share their sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from argosy.models.parts.einsum import Contraction, ContractionWrapper, Route, letters_of
from argosy.ops.grouped import grouped_matmul

# A Hessian of I channels needs at least I / SHARE tokens. Experts with fewer tokens are rounded without a Hessian.
SHARE = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InputSums:
    """Sums over the inputs of a contraction. G is the number of experts, 1 without experts.

    gram: X'X [G I I].
    absolute: the sum of |x| [G I].
    largest: the largest |x| [G I].
    tokens: the number of rows [G].
    """

    gram: Any
    absolute: Any
    largest: Any
    tokens: Any

    def added(self, other: "InputSums") -> "InputSums":
        """Returns the sums over both sets of inputs."""
        largest = jnp.maximum(self.largest, other.largest)
        return InputSums(self.gram + other.gram, self.absolute + other.absolute, largest, self.tokens + other.tokens)


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of the inputs of a contraction on calibration data, as numpy arrays. The fields are those of `InputSums`.

    factors: factors of the Gram matrix that a method has computed, kept for the next contraction that reads the same inputs.
    """

    gram: Float[np.ndarray, "G I I"]
    absolute: Float[np.ndarray, "G I"]
    largest: Float[np.ndarray, "G I"]
    tokens: Float[np.ndarray, " G"]
    factors: dict[Any, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(sums: InputSums) -> "InputStatistics":
        gram, absolute, largest, tokens = map(np.asarray, (sums.gram, sums.absolute, sums.largest, sums.tokens))
        return InputStatistics(gram, absolute, largest, tokens)

    @property
    def sufficient(self) -> Bool[np.ndarray, " G"]:
        """Whether each expert has enough tokens."""
        return self.tokens * SHARE >= self.gram.shape[-1]

    @property
    def mean_squares(self) -> Float[np.ndarray, "G I"]:
        """The mean of x^2; 1 for experts with too few tokens."""
        means = np.diagonal(self.gram, axis1=1, axis2=2) / np.maximum(self.tokens, 1.0)[:, None]
        return np.where(self.sufficient[:, None], means, 1.0).astype(np.float32)

    @property
    def mean_magnitudes(self) -> Float[np.ndarray, "G I"]:
        """The mean of |x|."""
        return (self.absolute / np.maximum(self.tokens, 1.0)[:, None]).astype(np.float32)


class StatisticsRecorder:
    """Collects the sums over the inputs of one layer's contractions, while a program is traced.

    live: the mask of the tokens that are not padding.
    sums: the sums over each array that contractions read.
    places: the index of each contraction's sums, by the name of the contraction.
    """

    def __init__(self, live: Bool[Array, "B T"]):
        self.live = live
        self.sums, self.places = list[InputSums](), dict[str, int]()
        self._seen = list[tuple[Any, Any, tuple[int, ...]]]()

    def add(self, name: str, of: Contraction, x: Array, route: Route | None) -> None:
        """Adds the input of a contraction.

        Raises:
            ValueError: the contraction was called before, and its calls cannot be distinguished.
        """
        if name in self.places:
            raise ValueError(f"{name} is called twice in a layer")
        letters = letters_of(of.eq)
        summed = tuple(letters.x.index(letter) for letter in of.inner)
        for place, (other, other_route, axes) in enumerate(self._seen):
            if other is x and other_route is (None if route is None else route.sizes) and axes == summed:
                self.places[name] = place
                return
        self._seen.append((x, None if route is None else route.sizes, summed))
        self.places[name] = len(self.sums)
        if route is None:
            self.sums.append(_dense(x, letters.x, summed, self.live))
        else:
            self.sums.append(_by_expert(x, route, len(route.sizes)))


class ObservedContraction(ContractionWrapper):
    """A contraction that records its inputs. The inputs of other equations over its weight (`via`) are not recorded."""

    def __init__(self, of: Contraction, name: str, recorder: StatisticsRecorder):
        self.eq, self.legend, self.several = of.eq, of.legend, of.several
        self.of, self.name, self.recorder = of, name, recorder

    def product(self, x: Float[Array, "..."], route: Route | None = None, *, dtype: Any = None) -> Float[Array, "..."]:
        self.recorder.add(self.name, self, x, route)
        return self.of.product(x, route, dtype=dtype)


def _dense(x: Array, letters: str, summed: Sequence[int], live: Array) -> InputSums:
    x = jnp.moveaxis(x, summed, range(-len(summed), 0)).astype(jnp.float32)
    rows = x.reshape(*x.shape[: x.ndim - len(summed)], -1)
    if letters.startswith("BT"):
        counts = live.reshape(*live.shape, *[1] * (rows.ndim - 3))
        counts = jnp.broadcast_to(counts, rows.shape[:-1])
    else:
        counts = jnp.ones(rows.shape[:-1], bool)
    rows, counts = rows.reshape(-1, rows.shape[-1]), counts.reshape(-1)
    # Padding may be NaN.
    rows = jnp.where(counts[:, None], rows, 0.0)
    gram = jnp.matmul(rows.T, rows, precision="highest")
    size = jnp.abs(rows)
    return InputSums(gram[None], size.sum(0)[None], size.max(0)[None], counts.astype(jnp.float32).sum()[None])


def _by_expert(x: Array, route: Route, experts: int) -> InputSums:
    x = x.astype(jnp.float32)
    I = x.shape[-1]
    used = jnp.arange(len(x)) < jnp.sum(route.sizes)
    x = jnp.where(used[:, None], x, 0.0)
    # X'X of each expert is the gradient of a grouped product whose other factor is also X.
    _, gradient = jax.vjp(lambda w: grouped_matmul(x, w, route.sizes), jnp.zeros((experts, I, I), jnp.float32))
    gram = gradient(x)[0]
    expert = jnp.where(used, route.expert, experts)
    size = jnp.abs(x)
    absolute = jax.ops.segment_sum(size, expert, experts + 1)[:experts]
    largest = jnp.maximum(jax.ops.segment_max(size, expert, experts + 1)[:experts], 0.0)
    return InputSums(gram, absolute, largest, route.sizes.astype(jnp.float32))
