"""A description of a call of the grouped matrix product, without data: what `argosy autotune` measures and stores a winner for."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from argosy.ops.op import Implementation
from argosy.ops.sizes import next_power_of_two


@dataclass(frozen=True)
class GroupedCase:
    """Describes a call of `grouped_matmul`. In measurements, rows are distributed over experts at random.

    rows: the number of rows.
    weights: the shape [E D M] of the weights.
    dtype: the dtype of the rows.
    stored: the dtype of the weights.
    """

    rows: int
    weights: tuple[int, int, int]
    dtype: str
    stored: str
    op: str = "experts"

    @property
    def name(self) -> str:
        E, D, M = self.weights
        stored = "" if self.stored == self.dtype else f" stored={self.stored}"
        return f"{self.op} {self.dtype} X{next_power_of_two(self.rows)} E{E} D{D} M{M}{stored}"

    def cut(self, rows: int) -> "GroupedCase":
        return replace(self, rows=rows)

    @property
    def reference_bytes(self) -> int:
        """The memory for one row in the reference, where every expert multiplies every row."""
        E, D, M = self.weights
        return 4 * E * (D + M)

    def arguments(self, seed: int = 0) -> tuple[tuple[Array, ...], dict[str, Array | None]]:
        """Returns random arguments: (arrays to differentiate with respect to, other arrays by name). The latter include integer
        weights."""
        rng, E = np.random.default_rng(seed), self.weights[0]
        x = jnp.asarray(rng.standard_normal((self.rows, self.weights[1])), self.dtype)
        sizes = jnp.asarray(rng.multinomial(self.rows, np.full(E, 1 / E)), jnp.int32)
        if jnp.issubdtype(self.stored, jnp.floating):
            w = jnp.asarray(rng.standard_normal(self.weights) * self.weights[1] ** -0.5, self.stored)
            return (x, w), {"w": None, "sizes": sizes}
        return (x,), {"w": jnp.asarray(rng.integers(-8, 8, self.weights), self.stored), "sizes": sizes}

    def described(self, inputs: tuple[Array, ...], more: dict[str, Any]) -> tuple[Any, ...]:
        """Returns the arguments of `Implementation.refuses`, from the result of `arguments`."""
        return inputs if more["w"] is None else (*inputs, more["w"])

    def call(self, implementation: Implementation, inputs: tuple[Array, ...], more: dict[str, Any]) -> Array:
        return implementation.run(*self.described(inputs, more), more["sizes"])


def grouped_case(x: Any, w: Any) -> GroupedCase | None:
    """Describes arguments of `grouped_matmul`, which may be tracers. None: a size is symbolic."""
    if not all(isinstance(size, int) for size in (*x.shape, *w.shape)):
        return None
    return GroupedCase(x.shape[0], w.shape, *(jax.dtypes.canonicalize_dtype(a.dtype).name for a in (x, w)))
