"""Noise schedules: the shares of image and noise at each timestep.

    x_t = alpha_t x_0 + sigma_t e        e normal, t in 0..1000

flow    alpha = 1 - t/1000, sigma = t/1000. Lipman et al. 2022 (arXiv:2210.02747), Liu et al. 2022 (arXiv:2209.03003)
betas   alpha^2 = product of (1 - beta_i) up to t, sigma^2 = 1 - alpha^2. Ho et al. 2020 (arXiv:2006.11239)
edm     c (image + s noise), c = 1 / sqrt(s^2 + sigma_data^2), t = log(s) / 4. Karras et al. 2022 (arXiv:2206.00364)

Training adds noise by a schedule, and samplers remove it by the same schedule. At x_t, a network predicts one of

    velocity = e - x_0 (flow)      epsilon = e      v = alpha e - sigma x_0 (arXiv:2202.00512)      sample = x_0

Then x_0 = a x_t + b prediction, with a and b from `to_sample`. Settings of training use these classes, so neither jax nor numpy is
imported at the top.
"""

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from argosy.core.registry import Registry
from argosy.core.settings import Settings
from argosy.models.diffusion.base import Prediction

if TYPE_CHECKING:
    import numpy as np

STEPS = 1000
"""Timesteps between an image (0) and noise."""


class FlowNoise(Settings):
    """Straight lines from image to noise."""

    def levels(self, timestep: Any) -> tuple[Any, Any]:
        """Computes alpha and sigma at these timesteps, each of the same shape. Takes NumPy and JAX arrays."""
        return 1 - timestep / STEPS, timestep / STEPS


class BetaNoise(Settings):
    """The noise of denoising diffusion models: 1,000 steps, each of which keeps 1 - beta of the variance."""

    start: float = Field(0.00085, gt=0, lt=1)
    """beta of the first step."""
    end: float = Field(0.012, gt=0, lt=1)
    """beta of the last step."""
    curve: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "scaled_linear"
    """How beta grows. scaled_linear: its square root grows linearly (Stable Diffusion); linear: beta does; squaredcos_cap_v2: alpha is
    a squared cosine (arXiv:2102.09672), and start and end have no effect."""
    zero_snr: bool = False
    """Scales alpha so that nothing of the image is left at the last step (arXiv:2305.08891)."""
    betas: tuple[float, ...] | None = None
    """All betas, in place of a curve."""

    @cached_property
    def alphas(self) -> "np.ndarray":
        """alpha^2 after each step, [1000] float32, with the same rounding as in the training of published models."""
        import numpy as np

        alphas = np.cumprod(1 - self._betas().astype(np.float32), dtype=np.float32)
        if self.zero_snr:
            root = np.sqrt(alphas)
            root = (root - root[-1]) * (root[0] / (root[0] - root[-1]))
            alphas = (root * root).astype(np.float32)
        return alphas

    def _betas(self) -> "np.ndarray":
        import numpy as np

        if self.betas is not None:
            return np.asarray(self.betas, np.float32)
        if self.curve == "linear":
            return np.linspace(self.start, self.end, STEPS, dtype=np.float32)
        if self.curve == "scaled_linear":
            return np.linspace(self.start**0.5, self.end**0.5, STEPS, dtype=np.float32) ** 2
        alphas = [math.cos((i / STEPS + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(STEPS + 1)]
        return np.array([min(1 - alphas[i + 1] / alphas[i], 0.999) for i in range(STEPS)])

    def levels(self, timestep: Any) -> tuple[Any, Any]:
        """Computes alpha and sigma at these timesteps, rounded to the nearest integers. Takes NumPy and JAX arrays."""
        import numpy as np

        if isinstance(timestep, np.ndarray | np.generic | float | int):
            alpha = self.alphas.astype(np.float64)[np.rint(timestep).astype(int)]
            return np.sqrt(alpha), np.sqrt(1 - alpha)
        import jax.numpy as jnp

        alpha = jnp.asarray(self.alphas)[jnp.rint(timestep).astype(jnp.int32)]
        return jnp.sqrt(alpha), jnp.sqrt(1 - alpha)

    @cached_property
    def ratios(self) -> "np.ndarray":
        """sigma / alpha after each step, [1000] float64. If nothing of the image is left, the ratio is about 4096, as in diffusers."""
        import numpy as np

        alphas = self.alphas.astype(np.float64)
        alphas = np.where(alphas > 0, alphas, 2.0**-24)
        return np.sqrt((1 - alphas) / alphas)


class EDMNoise(Settings):
    """Noise of any deviation s. The network reads log(s) / 4, and its input and target have variance 1.

    The paper writes D = c_skip y + c_out F(c_in y, log(s) / 4) of y = image + s noise. Here alpha = c_in and sigma = c_in s, and F is
    `prediction = edm`. CosXL predicts -F, which is `prediction = v`.
    """

    sigma_data: float = Field(0.5, gt=0)
    """The standard deviation of the images or latents."""
    sigma_min: float = Field(0.002, gt=0)
    """The smallest s that is drawn with."""
    sigma_max: float = Field(80.0, gt=0)
    """The largest s that is drawn with."""
    rho: float = Field(7.0, gt=0)
    """How far the steps of drawing crowd at small s, with levels=karras."""

    @model_validator(mode="after")
    def _ordered(self) -> "EDMNoise":
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"sigma_min = {self.sigma_min} is not below sigma_max = {self.sigma_max}")
        return self

    def of_deviation(self, s: Any) -> tuple[Any, Any]:
        """Computes alpha and sigma for noise of standard deviation s."""
        alpha = (s * s + self.sigma_data**2) ** -0.5
        return alpha, s * alpha

    def to_sample(self, prediction: Prediction, alpha: Any, sigma: Any) -> tuple[Any, Any]:
        """Computes a and b of x_0 = a x_t + b prediction, which are c_skip / c_in and c_out."""
        return self.sigma_data**2 * alpha, (-1 if prediction == "v" else 1) * self.sigma_data * sigma

    def target(self, prediction: Prediction, image: Any, noise: Any, alpha: Any, sigma: Any) -> Any:
        """Computes the training target of the network: (image - c_skip y) / c_out."""
        target = sigma / self.sigma_data * image - self.sigma_data * alpha * noise
        return -target if prediction == "v" else target


NOISES = Registry("noise schedule", {"flow": FlowNoise, "betas": BetaNoise, "edm": EDMNoise})


def to_sample(prediction: Prediction, alpha: Any, sigma: Any) -> tuple[Any, Any]:
    """Computes a and b of x_0 = a x_t + b prediction."""
    if prediction == "velocity":
        # From x_t = alpha x_0 + sigma e and velocity = e - x_0.
        return 1 / (alpha + sigma), -sigma / (alpha + sigma)
    if prediction == "epsilon":
        return 1 / alpha, -sigma / alpha
    if prediction == "v":
        return alpha, -sigma
    return 0 * alpha, 0 * alpha + 1


def target(prediction: Prediction, image: Any, noise: Any, alpha: Any, sigma: Any) -> Any:
    """Computes the training target of a network with this kind of prediction."""
    if prediction == "velocity":
        return noise - image
    if prediction == "epsilon":
        return noise
    return alpha * noise - sigma * image if prediction == "v" else image
