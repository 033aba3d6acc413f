"""Prodigy: Adam that estimates its learning rate from the distance that the weights have moved.

    r <- b3 r + (d / d0) d rate <g, w0 - w>;   s <- b3 s + (d / d0) d rate g;   d <- max(d, growth r / |s|_1)       over all weights
    m <- b1 m + (1 - b1) d g;   v <- b2 v + (1 - b2) d² g²;   w <- w - rate d (m / (sqrt(v) + d eps) + decay w)

Mishchenko and Defazio 2023 (arXiv:2306.06101, algorithm 4). As in the authors' code, b3 is the square root of b2. `learning_rate` is a
factor on the estimate, and so is the schedule.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.optimizers.base import Meanings, Optimizer, Transformation
from argosy.train.schedule import Factor


class ProdigyState(NamedTuple):
    """The state of Prodigy.

    count: the number of updates.
    mu, nu: the means of gradients and of their squares, scaled by the estimate.
    gradients: s of the equations.
    start: the initial weights, w0.
    distance: the estimate d.
    progress: r of the equations.
    """

    count: Any
    mu: Any
    nu: Any
    gradients: Any
    start: Any
    distance: Any
    progress: Any


class Prodigy(Optimizer):
    """Adam that estimates its learning rate. Mishchenko and Defazio 2023 (arXiv:2306.06101). It keeps four numbers a weight."""

    learning_rate: Annotated[float, Also("lr")] = Field(1.0, gt=0)
    """Factor on the estimated learning rate."""
    b1: Annotated[float, Also("beta1")] = Field(0.9, ge=0, lt=1)
    """Decay rate of the mean of gradients."""
    b2: Annotated[float, Also("beta2")] = Field(0.999, ge=0, lt=1)
    """Decay rate of the mean of squares; its root is that of the sums behind the estimate."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the mean of squares, times the estimate."""
    distance: Annotated[float, Also("d0", "estim_lr0")] = Field(1e-6, gt=0)
    """First estimate of the learning rate, which only grows."""
    growth: Annotated[float, Also("d_coef", "estim_lr_coef")] = Field(1.0, gt=0)
    """Factor on the estimate: below 1 it is careful."""
    bias_correction: Annotated[bool, Also("use_bias_correction")] = False
    """Whether the first steps are scaled as Adam's are."""
    safeguard_warmup: bool = False
    """Leaves the learning rate out of the sum under the estimate, so that a warm-up does not make it too large."""

    separable: ClassVar[bool] = False
    exact: ClassVar[frozenset[str]] = frozenset(["gradients", "start"])

    def rule(self, rate: Factor, meanings: Meanings, decays: Mapping[str, Any]) -> Transformation:
        import jax
        import jax.numpy as jnp
        import optax

        b3 = self.b2**0.5

        def init(params: Any) -> ProdigyState:
            zeros = lambda: {a: jnp.zeros_like(w) for a, w in params.items()}  # noqa: E731
            kind = next(iter(params.values())).dtype
            first = jnp.asarray(self.distance, kind)
            start = jax.tree.map(jnp.copy, params)
            return ProdigyState(jnp.zeros((), jnp.int32), zeros(), zeros(), zeros(), start, first, jnp.zeros((), kind))

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            count = state.count + 1
            d = state.distance
            kind = d.dtype
            lr = jnp.asarray(rate(state.count), kind)
            if self.bias_correction:
                lr = lr * jnp.sqrt(1 - self.b2 ** count.astype(kind)) / (1 - self.b1 ** count.astype(kind))
            share = d / self.distance * d
            scale = share * (1.0 if self.safeguard_warmup else lr)
            mu = {a: self.b1 * m + (1 - self.b1) * d * updates[a] for a, m in state.mu.items()}
            nu = {a: self.b2 * v + (1 - self.b2) * jnp.square(d * updates[a]) for a, v in state.nu.items()}
            gradients = {a: b3 * s + scale * updates[a] for a, s in state.gradients.items()}
            ways = [jnp.sum(g * (state.start[a] - params[a])) for a, g in updates.items()]
            progress = b3 * state.progress + share * lr * sum(ways)
            size = sum(jnp.sum(jnp.abs(s)) for s in gradients.values())
            estimate = jnp.where(size > 0, self.growth * progress / jnp.maximum(size, 1e-38), d)
            now = jnp.maximum(d, estimate).astype(kind)
            # The learning rate follows in `scale_by_learning_rate`, and its correction here.
            step = d * (lr / jnp.maximum(jnp.asarray(rate(state.count), kind), 1e-38) if self.bias_correction else 1.0)
            new_updates = {a: step * (mu[a] / (jnp.sqrt(nu[a]) + now * self.eps) + decays[a] * params[a]) for a in updates}
            return new_updates, ProdigyState(count, mu, nu, gradients, state.start, now, progress)

        return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(rate))
