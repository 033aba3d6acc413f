"""Laws from which noise levels are drawn in training: t from 0 (an image) to 1 (noise).

A law is its quantile function: t = quantile(u) for u uniform between 0 and 1. So a batch can draw its levels from equal strata, which
lowers the variance of the loss, and a histogram needs no samples. Every law may be shifted towards noise,

    t' = s t / (1 + (s - 1) t)

as samplers shift their steps (Esser et al. 2024, arXiv:2403.03206, section 5.3.2).
"""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from argosy.core.registry import Registry
from argosy.core.settings import Settings

if TYPE_CHECKING:
    from jaxtyping import Array, Float

TIMESTEPS = Registry("timestep law")
# The least and largest share of the range that is drawn: at 0 and 1 a normal quantile is infinite.
EDGE = 1e-4


class TimestepLaw(Settings):
    """The settings of every law."""

    shift: float | Literal["size"] = 1.0
    """How far levels are shifted towards noise; 1: not at all. Larger images need more: Stable Diffusion 3 shifts by 3 at 1024 x 1024.
    size: the square root of the image's positions over 256, as for a resolution that grows from 16 x 16 positions.
    """

    def quantile(self, u: "Float[Array, 'B']") -> "Float[Array, 'B']":
        """The noise level below which a share u of all levels lies, before the shift."""
        raise NotImplementedError

    def levels(self, u: "Float[Array, 'B']", positions: int) -> "Float[Array, 'B']":
        """The noise levels of these quantiles, for images of so many positions."""
        s = (positions / 256) ** 0.5 if self.shift == "size" else self.shift
        t = self.quantile(u)
        return s * t / (1 + (s - 1) * t)


class UniformTimesteps(TimestepLaw):
    """All levels alike."""

    def quantile(self, u: Any) -> Any:
        return u


class LogitNormalTimesteps(TimestepLaw):
    """t = sigmoid(mean + std z), z normal: more levels in the middle, where the prediction is hardest. arXiv:2403.03206."""

    mean: float = 0.0
    """Mean of logit(t): above 0 for more noise."""
    std: float = Field(1.0, gt=0)
    """Standard deviation of logit(t)."""

    def quantile(self, u: Any) -> Any:
        import jax
        import jax.numpy as jnp

        z = jax.scipy.special.ndtri(jnp.clip(u, EDGE, 1 - EDGE))
        return jax.nn.sigmoid(self.mean + self.std * z)


class ModeTimesteps(TimestepLaw):
    """t = 1 - u - scale (cos^2(pi u / 2) - 1 + u): more levels around 1/2 for a positive scale, and never none at the ends.
    arXiv:2403.03206."""

    scale: float = Field(1.29, ge=-1, le=1.75)
    """How much the middle is preferred; 0: not at all. Stable Diffusion 3's best is 1.29."""

    def quantile(self, u: Any) -> Any:
        import jax.numpy as jnp

        # The paper's function falls; read from the other end it is the quantile.
        v = 1 - u
        return 1 - v - self.scale * (jnp.cos(jnp.pi / 2 * v) ** 2 - 1 + v)


_HERE = "argosy.train.objectives.images.timesteps"
TIMESTEPS.add("uniform", f"{_HERE}:UniformTimesteps")
TIMESTEPS.add("logit_normal", f"{_HERE}:LogitNormalTimesteps")
TIMESTEPS.add("mode", f"{_HERE}:ModeTimesteps")
