"""Adan: momentum of the gradient and of its differences.

    m <- b1 m + (1 - b1) g;   d <- b2 d + (1 - b2) (g - g');   n <- b3 n + (1 - b3) (g + b2 (g - g'))²       g' the gradient before
    w <- w - rate ((m̂ + b2 d̂) / (sqrt(n̂) + eps) + decay w)

Difference from the paper: weights decay as in AdamW; the paper divides by 1 + rate decay. Optax's Adan is not used, because Optax 0.2.8
has 1 - b2 in place of b2 in both sums, although its b2 is a decay rate too.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.optimizers.base import Meanings, Optimizer, Transformation, add_decay
from argosy.train.schedule import Factor


class AdanState(NamedTuple):
    """The state of Adan.

    count: the number of updates.
    mu: the mean of gradients, m.
    differences: the mean of differences of gradients, d.
    nu: the mean of squares, n.
    last: the gradient of the last step, g'.
    """

    count: Any
    mu: Any
    differences: Any
    nu: Any
    last: Any


class Adan(Optimizer):
    """Adam with Nesterov momentum estimated from differences of gradients. Xie et al. 2022 (arXiv:2208.06677). It keeps four numbers a
    weight."""

    b1: Annotated[float, Also("beta1")] = Field(0.98, ge=0, lt=1)
    """Decay rate of the mean of gradients: 1 minus the paper's."""
    b2: Annotated[float, Also("beta2")] = Field(0.92, ge=0, lt=1)
    """Decay rate of the mean of their differences."""
    b3: Annotated[float, Also("beta3")] = Field(0.99, ge=0, lt=1)
    """Decay rate of the mean square."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the mean square."""

    # The small difference from the last gradient is what counts.
    exact: ClassVar[frozenset[str]] = frozenset(["last"])

    def rule(self, rate: Factor, meanings: Meanings, decays: Mapping[str, Any]) -> Transformation:
        import jax.numpy as jnp
        import optax

        def init(params: Any) -> AdanState:
            zeros = [{a: jnp.zeros_like(w) for a, w in params.items()} for _ in range(4)]
            return AdanState(jnp.zeros((), jnp.int32), *zeros)

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            count = state.count + 1
            new_updates, mu, differences, nu = dict[str, Any](), dict[str, Any](), dict[str, Any](), dict[str, Any]()
            for a, g in updates.items():
                t = count.astype(g.dtype)
                difference = jnp.where(state.count == 0, 0, g - state.last[a])
                mu[a] = self.b1 * state.mu[a] + (1 - self.b1) * g
                differences[a] = self.b2 * state.differences[a] + (1 - self.b2) * difference
                nu[a] = self.b3 * state.nu[a] + (1 - self.b3) * jnp.square(g + self.b2 * difference)
                way = mu[a] / (1 - self.b1**t) + self.b2 * differences[a] / (1 - self.b2**t)
                new_updates[a] = way / (jnp.sqrt(nu[a] / (1 - self.b3**t)) + self.eps)
            return new_updates, AdanState(count, mu, differences, nu, dict(updates))

        mean = optax.GradientTransformation(init, update)
        return optax.chain(mean, add_decay(decays), optax.scale_by_learning_rate(rate))
