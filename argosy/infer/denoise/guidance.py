"""Classifier-free guidance: the network is evaluated with and without its conditions, and the difference of the predictions is scaled.

    guided = without + scale (with - without)        Ho and Salimans 2022 (arXiv:2207.12598)

interval    applies guidance between two timesteps only; elsewhere the result is `with`. Kynkäänniemi et al. 2024 (arXiv:2404.07724)
zero_star   first scales `without` by <with, without> / |without|^2, so that it is nearest to `with`. Fan et al. 2025 (arXiv:2503.18886)
rescale     mixes in, with this weight, the result scaled to the standard deviation of `with`. Lin et al. 2023 (arXiv:2305.08891)
"""

import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field, model_validator

from argosy.core.settings import Settings


class Guidance(Settings):
    """How a prediction with conditions and one without become one."""

    interval: tuple[float, float] | None = None
    """The timesteps at which it acts, the lowest and the highest. None: all."""
    zero_star: bool = False
    """Scales the prediction without conditions to lie nearest the other."""
    rescale: float = Field(0.0, ge=0, le=1)
    """Share of the standard deviation that is made that of the prediction with conditions; 0.7 in the paper."""

    @model_validator(mode="after")
    def _ordered(self) -> "Guidance":
        if self.interval is not None and self.interval[0] > self.interval[1]:
            raise ValueError(f"interval = {list(self.interval)}: the lower timestep comes first")
        return self

    def apply(
        self,
        conditioned: Float[Array, "B *F H W C"],
        unconditioned: Float[Array, "B *F H W C"],
        scale: Float[Array, "B"],
        timestep: Float[Array, ""],
    ) -> Float[Array, "B *F H W C"]:
        """Combines the predictions with and without conditions. An image with scale 1 gets `conditioned`."""
        axes = tuple(range(1, conditioned.ndim))
        base = unconditioned
        if self.zero_star:
            along = jnp.sum(conditioned * unconditioned, axes, keepdims=True)
            base = base * along / (jnp.sum(unconditioned * unconditioned, axes, keepdims=True) + 1e-8)
        by = jnp.expand_dims(scale, axes)
        guided = base + by * (conditioned - base)
        if self.rescale:
            matched = guided * jnp.std(conditioned, axes, keepdims=True) / jnp.std(guided, axes, keepdims=True)
            guided = self.rescale * matched + (1 - self.rescale) * guided
        acts = by != 1
        if self.interval is not None:
            acts &= (timestep >= self.interval[0]) & (timestep <= self.interval[1])
        return jnp.where(acts, guided, conditioned)
