"""Schedule-free AdamW: the weights are averaged instead of decaying the learning rate.

    v <- b2 v + (1 - b2) g²;   z <- z - rate (g / (sqrt(v̂) + eps) + decay y)          g: the gradient at y, the weights that are trained
    x <- (1 - c) x + c z;   y <- b1 x + (1 - b1) z                                   c: rate² over the sum of its squares so far

Defazio et al. 2024 (arXiv:2405.15682). A step reads y. The average x is evaluated, sampled from and saved. x is not stored, because it
is (y - (1 - b1) z) / b1. As in the authors' code, the rate in c is the largest so far. The schedule should only warm up.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.optimizers.base import Meanings, Optimizer, Transformation
from argosy.train.schedule import Factor


class ScheduleFreeState(NamedTuple):
    """The state of schedule-free AdamW.

    schedule: the number of updates.
    nu: the mean of squared gradients.
    z: the weights that gradients move.
    rate: the largest learning rate so far.
    weight: the sum of the weights in the average.
    b1: the setting `b1`.
    """

    schedule: Any
    nu: Any
    z: Any
    rate: Any
    weight: Any
    b1: Any


class ScheduleFree(Optimizer):
    """AdamW whose weights are averaged, in place of a decay of the learning rate. Defazio et al. 2024 (arXiv:2405.15682). Evaluations,
    samples and checkpoints have the average. It goes with `schedule=constant`."""

    learning_rate: Annotated[float, Also("lr", "max_lr", "peak_lr")] = Field(2.5e-3, gt=0)
    """Peak learning rate: one to ten times as large as that of AdamW with a schedule."""
    b1: Annotated[float, Also("beta1", "adam_beta1")] = Field(0.9, gt=0, lt=1)
    """Share of the average in the weights at which gradients are taken."""
    b2: Annotated[float, Also("beta2", "adam_beta2")] = Field(0.999, ge=0, lt=1)
    """Decay rate of the mean of squared gradients."""
    eps: Annotated[float, Also("adam_epsilon")] = Field(1e-8, gt=0)
    """Added to the root of that mean."""
    power: Annotated[float, Also("weight_lr_power")] = Field(2.0, ge=0)
    """Power of the learning rate by which steps count in the average."""

    separable: ClassVar[bool] = False
    averages: ClassVar[bool] = True
    exact: ClassVar[frozenset[str]] = frozenset(["z"])

    def rule(self, rate: Factor, meanings: Meanings, decays: Mapping[str, Any]) -> Transformation:
        import jax
        import jax.numpy as jnp
        import optax

        def init(params: Any) -> ScheduleFreeState:
            kind = next(iter(params.values())).dtype
            zero = lambda: jnp.zeros((), kind)  # noqa: E731
            return ScheduleFreeState(
                optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)),
                {a: jnp.zeros_like(w) for a, w in params.items()},
                jax.tree.map(jnp.copy, params),
                zero(),
                zero(),
                jnp.asarray(self.b1, kind),
            )

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            kind = state.rate.dtype
            count = state.schedule.count
            t = count + 1
            lr = jnp.asarray(rate(count), kind)
            largest = jnp.maximum(state.rate, lr)
            weight = largest**self.power
            total = state.weight + weight
            c = jnp.where(total > 0, weight / jnp.maximum(total, 1e-38), 0)
            new_updates, nu, z = dict[str, Any](), dict[str, Any](), dict[str, Any]()
            for a, g in updates.items():
                nu[a] = self.b2 * state.nu[a] + (1 - self.b2) * jnp.square(g)
                way = g / (jnp.sqrt(nu[a] / (1 - self.b2 ** t.astype(kind))) + self.eps) + decays[a] * params[a]
                z[a] = state.z[a] - lr * way
                # b1 x' + (1 - b1) z' - y, with x' = (1 - c) x + c z': what the authors add to y.
                new_updates[a] = c * (state.z[a] - params[a]) + lr * (self.b1 * (1 - c) - 1) * way
            return new_updates, ScheduleFreeState(optax.ScaleByScheduleState(t), nu, z, largest, total, state.b1)

        return optax.GradientTransformation(init, update)


def average_of(optimizer: Any, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Computes the average x from the trained weights and the optimizer's state. Returns None if the optimizer keeps no average."""
    import jax

    is_state = lambda part: isinstance(part, ScheduleFreeState)  # noqa: E731
    states = [part for part in jax.tree.leaves(optimizer, is_leaf=is_state) if is_state(part)]
    if not states:
        return None
    z, b1 = states[0].z, states[0].b1
    return {a: (w - (1 - b1) * z[a]) / b1 for a, w in params.items()}
