"""EDM: a denoiser whose input and target have variance 1 at every level of noise.

    y = image + s noise                      log s ~ N(mean, std^2)
    D = c_skip y + c_out F(c_in y, log(s) / 4)
    loss = mean of w (D - image)^2,  w = 1 / c_out^2        the plain squared error of F

    c_in = 1 / sqrt(s^2 + d^2),  c_skip = d^2 c_in^2,  c_out = s d c_in        d: sigma_data

Karras et al. 2022 (arXiv:2206.00364), table 1. The model predicts F (`model.prediction=edm`), or -F (`v`), which it is in CosXL. Time t
of the law is that of flows with the same share of noise, s = t / (1 - t), so `logit_normal` with mean -1.2 and deviation 1.2 is the
paper's law, and error_q1 to error_q4 are quarters of t. Images are drawn by Heun's method (`infer.denoise.samplers.euler`).
"""

from typing import TYPE_CHECKING, Annotated, Any

from argosy.core.settings import Also, Choice
from argosy.models.diffusion.noise import EDMNoise
from argosy.train.objectives.images.diffusion import Diffusion
from argosy.train.objectives.images.timesteps import TIMESTEPS, LogitNormalTimesteps

if TYPE_CHECKING:
    from jaxtyping import Array

# How near times come to 0 and 1.
EDGE = 1e-6


class EDM(Diffusion):
    """Denoising with inputs and targets of variance 1 (EDM)."""

    timesteps: Annotated[Any, Choice(TIMESTEPS), Also("noise_distribution")] = LogitNormalTimesteps(mean=-1.2, std=1.2)
    """The law of the noise levels. The paper's: logit_normal with mean -1.2 (P_mean) and deviation 1.2 (P_std) of log s."""
    noise: EDMNoise = EDMNoise()
    """The deviation of the images, and the levels that images are drawn with."""

    def noise_of(self, prediction: str) -> EDMNoise:
        return self.noise

    def levels_at(self, prediction: str, t: "Array") -> "tuple[Array, Array, Array]":
        import jax.numpy as jnp

        # A law may draw 0 or 1, where s is no number.
        t = jnp.clip(t, EDGE, 1 - EDGE)
        s = t / (1 - t)
        return jnp.log(s) / 4, *self.noise.of_deviation(s)

    def target(self, prediction: Any, images: "Array", noise: "Array", alpha: "Array", sigma: "Array") -> "Array":
        return self.noise.target(prediction, images, noise, alpha, sigma)
