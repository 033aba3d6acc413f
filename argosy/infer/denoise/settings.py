"""Settings of sampling: the method, its timesteps, and the noise that the model was trained with. Imports no jax."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from argosy.core.errors import BadInput, nearest
from argosy.core.registry import Registry
from argosy.core.settings import Choice, Settings
from argosy.models.diffusion.base import Prediction
from argosy.models.diffusion.noise import NOISES, EDMNoise, FlowNoise, to_sample

_HERE = "argosy.infer.denoise.samplers"

SAMPLERS = Registry(
    "sampler",
    {
        "euler": f"{_HERE}.euler:euler",
        "heun": f"{_HERE}.euler:heun",
        "euler_ancestral": f"{_HERE}.euler:euler_ancestral",
        "ddim": f"{_HERE}.ddim:ddim",
        "ddpm": f"{_HERE}.ddim:ddpm",
        "lcm": f"{_HERE}.lcm:lcm",
        "pndm": f"{_HERE}.pndm:pndm",
        "dpmpp_2m": f"{_HERE}.dpm:dpmpp_2m",
        "unipc": f"{_HERE}.unipc:unipc",
    },
)


EDM_SAMPLERS = ("euler", "heun", "euler_ancestral", "dpmpp_2m")
EDM_ALONE = "prediction = edm is of models trained with objective=edm: set noise.kind = edm"


class Shift(Settings):
    """How flow samplers move their steps toward noise: s' = k s / (1 + (k - 1) s), of Esser et al. 2024 (arXiv:2403.03206)."""

    factor: float = Field(1.0, gt=0)
    """k, if it does not depend on the size of the image."""
    dynamic: bool = False
    """Whether k = e^mu grows with the image: mu goes linearly from `low` at `low_length` positions to `high` at `high_length`."""
    low: float = 0.5
    """mu at `low_length` positions."""
    high: float = 1.15
    """mu at `high_length` positions."""
    low_length: int = Field(256, gt=0)
    """Positions of a small image."""
    high_length: int = Field(4096, gt=0)
    """Positions of a large image."""
    kind: Literal["exponential", "linear"] = "exponential"
    """linear: k = mu itself."""
    terminal: float | None = Field(None, gt=0, lt=1)
    """Stretches the steps so that the last noise level is this. None: not at all."""

    empirical: bool = False
    """Whether mu follows Flux.2's own fit to positions and steps, in place of the line."""

    def of(self, positions: int | None, steps: int = 1) -> float:
        """The factor k for an image that is so many tokens to the network, drawn in so many steps.

        Raises:
            BadInput: k depends on the tokens, and they are not known.
        """
        if not self.dynamic:
            return self.factor
        if positions is None:
            raise BadInput("sampler.shift.dynamic: the number of positions of the image is not known")
        if self.empirical:
            return math.exp(empirical_mu(positions, steps))
        slope = (self.high - self.low) / (self.high_length - self.low_length)
        mu = self.low + slope * (positions - self.low_length)
        return math.exp(mu) if self.kind == "exponential" else mu


def empirical_mu(positions: int, steps: int) -> float:
    """The shift mu of Flux.2. For 10 and for 200 steps it is linear in the number of positions (tokens of the image). For other numbers
    of steps it is interpolated linearly in the steps. Above 4,300 positions it is always that of 200 steps."""
    of_200, of_10 = 0.00016927 * positions + 0.45666666, 8.73809524e-05 * positions + 1.89833333
    return of_200 if positions > 4300 else of_200 + (of_200 - of_10) / 190 * (steps - 200)


class SamplerSettings(Settings):
    """How images are drawn."""

    name: str = "euler"
    """The method: euler, heun, euler_ancestral, ddim, ddpm, lcm, pndm, dpmpp_2m or unipc."""
    noise: Annotated[Any, Choice(NOISES, tag="kind")] = FlowNoise()
    """The noise schedule of the model's training."""
    prediction: Prediction = "velocity"
    """What the network predicts."""
    shift: Shift = Shift()
    """For flow models."""
    spacing: Literal["leading", "linspace", "trailing"] = "linspace"
    """Which of the 1,000 timesteps are used, as diffusers names them. leading: multiples from 0; linspace: evenly from 0 to 999;
    trailing: evenly from 1,000 down. Flow models take theirs evenly from 1 down to 1/1000, or as their pipelines do."""
    offset: int = Field(0, ge=0)
    """Added to timesteps with spacing=leading."""
    final: Literal["zero", "first"] = "zero"
    """The noise after the last step: none, or that of the first timestep of training."""
    levels: Literal["timesteps", "karras", "exponential"] = "timesteps"
    """How noise levels lie between the largest and the smallest. timesteps: those of the timesteps; karras: arXiv:2206.00364, rho 7;
    exponential: evenly in their logarithm."""
    order: int = Field(2, ge=1, le=3)
    """Order of dpmpp_2m (1 or 2) and unipc (1 to 3)."""
    eta: float = Field(0.0, ge=0)
    """Share of DDPM's noise that ddim spreads."""
    stochastic: bool = False
    """Spreads fresh noise: flow Euler draws the image anew at each step; dpmpp_2m becomes its SDE."""
    clip: float | None = Field(None, gt=0)
    """Clips predicted images to this size (ddim, ddpm, lcm). None: not at all."""
    lower_order_final: bool = True
    """Takes the last steps at a lower order where there are fewer than 15 (dpmpp_2m), or always (unipc)."""
    euler_at_final: bool = False
    """Takes the last step of dpmpp_2m at first order."""
    variance: Literal["small", "large"] = "small"
    """The noise of ddpm: that of the posterior, or beta."""
    original_steps: int = Field(50, gt=0)
    """Steps of the distillation of an lcm model."""
    timestep_scaling: float = Field(10.0, gt=0)
    """Factor on timesteps in the boundary condition of lcm."""

    def to_sample(self, alpha: float, sigma: float) -> tuple[float, float]:
        """a and b of x_0 = a x_t + b prediction."""
        if isinstance(self.noise, EDMNoise):
            return self.noise.to_sample(self.prediction, alpha, sigma)
        return to_sample(self.prediction, alpha, sigma)

    @model_validator(mode="after")
    def _fits(self) -> "SamplerSettings":
        if self.name not in SAMPLERS:
            raise ValueError(f"unknown sampler `{self.name}`; {nearest(self.name, SAMPLERS)}")
        is_flow = isinstance(self.noise, FlowNoise)
        if self.prediction == "velocity" and not is_flow:
            raise ValueError("prediction = velocity is of flow models: set noise.kind = flow")
        if self.prediction != "velocity" and is_flow:
            raise ValueError(f"noise.kind = flow with prediction = {self.prediction}: flow models predict a velocity")
        if is_flow and self.name in ("ddim", "ddpm", "lcm", "pndm"):
            raise ValueError(f"{self.name} is of models trained with betas; flow models take euler, heun, dpmpp_2m or unipc")
        is_edm = isinstance(self.noise, EDMNoise)
        if is_edm != (self.prediction == "edm") and not (is_edm and self.prediction == "v"):
            raise ValueError(f"noise.kind = edm is of prediction = edm or v, and this is {self.prediction}" if is_edm else EDM_ALONE)
        if is_edm and self.name not in EDM_SAMPLERS:
            raise ValueError(f"{self.name} does not follow noise.kind = edm, which takes {', '.join(EDM_SAMPLERS)}")
        if is_edm and self.levels == "timesteps":
            raise ValueError("levels = timesteps: noise.kind = edm has no list of them; levels = karras or exponential")
        if self.prediction == "sample" and self.name in ("euler_ancestral", "pndm"):
            raise ValueError(f"{self.name} is not defined for prediction = sample")
        if self.name == "dpmpp_2m" and self.order > 2:
            raise ValueError("dpmpp_2m has order 1 or 2")
        return self
