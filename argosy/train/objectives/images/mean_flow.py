"""MeanFlow: a denoiser learns the mean velocity over an interval, so that an image takes few steps, or one.

    u(x_t, r, t) = 1 / (t - r) integral of the velocity from r to t        x_r = x_t - (t - r) u
    target = v - (t - r) du/dt        v = noise - image, du/dt along (v, dr/dt = 0, dt/dt = 1), without gradient
    loss = mean of w |u - target|^2   w = 1 / (|u - target|^2 + eps)^power, without gradient

Geng et al. 2025 (arXiv:2505.13447): t and r are two draws of the law, and the larger is t; for a share of the rows r = t, where the
target is that of flow matching. du/dt is one product of the Jacobian with a vector, forward through the model. Guidance is that of
drawing: unlike in the paper, no scale is trained in.

The model reads the interval t - r beside t (`model.intervals`). At r = t it is a flow model, and Euler's method draws with it.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from argosy.core.settings import Also, Choice
from argosy.models.diffusion.noise import STEPS
from argosy.train.objectives.images.diffusion import Diffusion, in_quarter
from argosy.train.objectives.images.timesteps import TIMESTEPS, LogitNormalTimesteps
from argosy.train.objectives.objective import Needs

if TYPE_CHECKING:
    from jaxtyping import Array

    from argosy.train.objectives.loss import Loss, Models


class MeanFlow(Diffusion):
    """Mean velocities over intervals, for images in few steps (MeanFlow)."""

    needs: ClassVar[Needs] = Needs(inputs="images", forward=True)

    timesteps: Annotated[Any, Choice(TIMESTEPS), Also("time_dist")] = LogitNormalTimesteps(mean=-0.4)
    """The law of both ends of an interval. The paper's: logit_normal with mean -0.4."""
    equal: Annotated[float, Also("data_proportion")] = Field(0.5, ge=0, le=1)
    """Share of the rows whose interval is empty, which train plain flow matching. 0.75 is the paper's best for ImageNet; on digits 0.5
    is better."""
    power: Annotated[float, Also("norm_p")] = Field(1.0, ge=0)
    """Power of the error by which a row's loss is divided; 0: the squared error itself."""
    power_eps: Annotated[float, Also("norm_eps")] = Field(1e-3, gt=0)
    """Added to the error there."""

    @property
    def conditions(self) -> frozenset[str]:
        return super().conditions | {"interval"}

    def __call__(self, models: "Models", batch: "dict[str, Array]", key: Any) -> "Loss":
        import jax
        import jax.numpy as jnp

        from argosy.train.objectives.loss import Loss, WeightedMean

        model, images, row = models["model"], batch["images"], batch["row"]
        of_noise, of_levels, of_labels, of_ends, of_equal = (jax.random.fold_in(key, i) for i in range(5))
        noise = self.noise_by_row(of_noise, images, row)
        positions = images.shape[1] * images.shape[2] // model.config.size_multiple**2
        rows = (len(images),)
        one = self.timesteps.levels(self.quantiles(jax.random.uniform(of_levels, rows)), positions)
        other = self.timesteps.levels(jax.random.uniform(of_ends, rows), positions)
        other = jnp.where(jax.random.uniform(of_equal, rows) < self.equal, one, other)
        t, interval = jnp.maximum(one, other), jnp.abs(one - other)
        wide = t[:, None, None, None]
        conditions = self.conditions_of(model.config, batch, of_labels)

        def mean_velocity(x: "Array", t: "Array", interval: "Array") -> "Array":
            return model(x, t * STEPS, conditions._replace(interval=interval * STEPS))

        velocity, ones = noise - images, jnp.ones_like(t)
        at = (1 - wide) * images + wide * noise, t, interval
        mean, slope = jax.jvp(mean_velocity, at, (velocity, ones, ones))
        target = jax.lax.stop_gradient(velocity - interval[:, None, None, None] * slope)
        error = jnp.mean((mean - target) ** 2, (1, 2, 3))
        there = (row >= 0).astype(jnp.float32)
        weight = there / (jax.lax.stop_gradient(error) + self.power_eps) ** self.power
        parts = {f"error_q{q + 1}": there * in_quarter(t, q) for q in range(4)} | {"error": there}
        metrics = {name: WeightedMean(jnp.sum(error * w), jnp.sum(w)) for name, w in parts.items()}
        return Loss(WeightedMean(jnp.sum(weight * error), jnp.sum(there)), metrics)
