"""Adafactor: the mean of squared gradients of a matrix is stored as the product of a row and a column.

    R <- b R + (1 - b) mean over columns of g² + 1e-30;   C likewise over rows;   b = 1 - t^-0.8
    u = g / sqrt(R C / mean(R));   u <- u / max(1, rms(u) / threshold);   w <- w - rate (max(1e-3, rms(w)) u + decay w)

Differences from the paper: the learning rate is that of the schedule, not 1 / sqrt(t); there is no momentum; weight decay is decoupled;
and root mean squares are taken over the matrix of each layer and expert, however matrices are stacked.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.optimizers.base import Meanings, Optimizer, Transformation, add_decay
from argosy.train.optimizers.matrices import views_of
from argosy.train.schedule import Factor

# Added to squared gradients, and the least root mean square of a weight that scales its update.
TINY, LEAST = 1e-30, 1e-3


class AdafactorState(NamedTuple):
    """The state of Adafactor.

    count: the number of updates.
    rows, columns: the factors of the mean of squared gradients, for large matrices.
    nu: the mean of squared gradients, for all other weights.
    """

    count: Any
    rows: Any
    columns: Any
    nu: Any


class Adafactor(Optimizer):
    """Adam's mean of squares in the memory of a row and a column, without momentum. Shazeer and Stern 2018 (arXiv:1804.04235)."""

    learning_rate: Annotated[float, Also("lr", "max_lr", "peak_lr")] = Field(1e-2, gt=0)
    """Peak learning rate, relative to the root mean square of each weight; with `relative=false`, absolute as Adam's."""
    relative: Annotated[bool, Also("scale_parameter", "multiply_by_parameter_scale")] = True
    """Whether updates are multiplied by the root mean square of their weight."""
    exponent: Annotated[float, Also("decay_rate", "beta2_decay")] = Field(0.8, gt=0)
    """The mean square keeps 1 - t^-exponent of its value in step t."""
    threshold: Annotated[float | None, Also("clip_threshold", "clipping_threshold", "adafactor_d")] = Field(1.0, gt=0)
    """Largest root mean square of an update, before the learning rate. None: unlimited."""
    factored: Annotated[int, Also("min_dim_size_to_factor")] = Field(128, gt=0)
    """Matrices with fewer rows or columns than this keep their mean square in full."""

    exact: ClassVar[frozenset[str]] = frozenset(["rows", "columns"])

    def apart(self, meanings: Meanings) -> frozenset[str]:
        return frozenset()

    def rule(self, rate: Factor, meanings: Meanings, decays: Mapping[str, Any]) -> Transformation:
        import jax.numpy as jnp
        import optax

        views = views_of(meanings, lookups=True)

        def is_factored(address: str, shape: tuple[int, ...]) -> bool:
            return address in views and min(views[address].sizes(shape)) >= self.factored

        def numbers(address: str) -> tuple[int, ...]:
            """Returns the axes of one matrix, or of one layer of a weight that is no matrix."""
            meaning, stored = meanings[address]
            view = views.get(address)
            return tuple(range(stored - len(meaning.letters), stored)) if view is None else view.rows + view.columns

        def rms(address: str, x: Any) -> Any:
            axes = numbers(address)
            return jnp.sqrt(jnp.mean(jnp.square(x), axes, keepdims=True)) if axes else jnp.abs(x)

        def init(params: Any) -> AdafactorState:
            large = {a: w for a, w in params.items() if is_factored(a, w.shape)}

            def without(w: Any, axes: tuple[int, ...]) -> Any:
                return jnp.zeros([1 if i in axes else n for i, n in enumerate(w.shape)], w.dtype)

            return AdafactorState(
                jnp.zeros((), jnp.int32),
                {a: without(w, views[a].columns) for a, w in large.items()},
                {a: without(w, views[a].rows) for a, w in large.items()},
                {a: jnp.zeros_like(w) for a, w in params.items() if a not in large},
            )

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            count = state.count + 1
            new_updates, rows, columns, nu = dict[str, Any](), dict[str, Any](), dict[str, Any](), dict[str, Any]()
            for a, g in updates.items():
                b = (1 - count.astype(g.dtype) ** -self.exponent).astype(g.dtype)
                square = jnp.square(g) + TINY
                if a in state.nu:
                    nu[a] = b * state.nu[a] + (1 - b) * square
                    u = g / jnp.sqrt(nu[a])
                else:
                    view = views[a]
                    rows[a] = b * state.rows[a] + (1 - b) * jnp.mean(square, view.columns, keepdims=True)
                    columns[a] = b * state.columns[a] + (1 - b) * jnp.mean(square, view.rows, keepdims=True)
                    share = rows[a] / jnp.mean(rows[a], view.rows, keepdims=True)
                    u = g / jnp.sqrt(share) / jnp.sqrt(columns[a])
                if self.threshold is not None:
                    u = u / jnp.maximum(1.0, rms(a, u) / self.threshold)
                new_updates[a] = u * jnp.maximum(LEAST, rms(a, params[a])) if self.relative else u
            return new_updates, AdafactorState(count, rows, columns, nu)

        mean = optax.GradientTransformation(init, update)
        return optax.chain(mean, add_decay(decays), optax.scale_by_learning_rate(rate))
