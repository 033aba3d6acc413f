"""Computes the timesteps and noise levels for a number of steps, as diffusers does. NumPy in double precision, on the host."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.infer.denoise.settings import SamplerSettings
from argosy.models.diffusion.noise import STEPS, BetaNoise, EDMNoise, FlowNoise

RHO = 7.0


@dataclass(frozen=True)
class Points:
    """The noise levels that a sampler visits.

    timesteps: [S] the timestep that the network gets at each level.
    alpha, sigma: [S + 1] the coefficients of image and noise at each level, and at the end.
    total: the number of steps before `strength` was applied.
    """

    timesteps: np.ndarray
    alpha: np.ndarray
    sigma: np.ndarray
    total: int

    def __len__(self) -> int:
        return len(self.timesteps)

    def level(self, i: int) -> tuple[float, float]:
        """alpha and sigma at point i."""
        return float(self.alpha[i]), float(self.sigma[i])

    @property
    def log_ratio(self) -> np.ndarray:
        """lambda = log(alpha/sigma) at each level [S + 1]; infinite where there is no noise."""
        with np.errstate(divide="ignore"):
            return np.log(self.alpha) - np.log(self.sigma)


def _from(points: Points, strength: float, is_flow: bool) -> Points:
    """Keeps the last steps, a share `strength` of all.

    Raises:
        BadInput: no step is left, or `strength` is out of range.
    """
    if not 0 < strength <= 1:
        raise BadInput(f"strength = {strength}: above 0, up to 1")
    steps = len(points)
    # diffusers' pipelines of flow models round down here, and the others round up.
    first = int(steps - steps * strength) if is_flow else steps - int(steps * strength)
    if first >= steps:
        raise BadInput(f"strength = {strength} of {steps} steps leaves none", hint="more steps, or a larger strength")
    return Points(points.timesteps[first:], points.alpha[first:], points.sigma[first:], steps)


def flow_points(settings: SamplerSettings, sigmas: np.ndarray, positions: int | None, strength: float) -> Points:
    """The points of a flow model.

    Args:
        sigmas: the noise levels before the settings' shift.
        positions: number of tokens of the image, for a shift that depends on the size.
        strength: the share of the steps to keep.
    """
    k = settings.shift.of(positions, len(sigmas))
    sigmas = k * sigmas / (1 + (k - 1) * sigmas)
    if settings.shift.terminal is not None:
        sigmas = 1 - (1 - sigmas) * (1 - settings.shift.terminal) / (1 - sigmas[-1])
    sigmas = spread_levels(settings, sigmas, len(sigmas))
    sigmas = np.append(sigmas, sigmas[-1] if settings.final == "first" else 0.0)
    return _from(Points(sigmas[:-1] * STEPS, 1 - sigmas, sigmas, len(sigmas) - 1), strength, True)


def flow_grid(settings: SamplerSettings, steps: int) -> np.ndarray:
    """Evenly spaced noise levels of a flow model, before the shift.

    With spacing=linspace the smallest is the shifted level of the last timestep of training, so the shift acts on it twice. diffusers
    does this if a pipeline passes no levels itself (Stable Diffusion 3).
    """
    if settings.spacing == "trailing":
        return np.linspace(1, 1 / steps, steps)
    if settings.spacing == "leading":
        raise BadInput("spacing=leading is of models trained with betas", hint="spacing=trailing or linspace")
    least, k = 1 / STEPS, 1.0 if settings.shift.dynamic else settings.shift.factor
    return np.linspace(1, k * least / (1 + (k - 1) * least), steps)


def spread_levels(settings: SamplerSettings, sigmas: np.ndarray, steps: int) -> np.ndarray:
    """Replaces noise levels by others between the first and the last, spaced as `settings.levels` says."""
    high, low = sigmas[0], sigmas[-1]
    if settings.levels == "karras":
        return np.linspace(high ** (1 / RHO), low ** (1 / RHO), steps) ** RHO
    return np.exp(np.linspace(np.log(high), np.log(low), steps)) if settings.levels == "exponential" else sigmas


def timestep_grid(settings: SamplerSettings, steps: int, without_last: bool = False) -> np.ndarray:
    """The timesteps of a model trained with a beta schedule, descending.

    Args:
        without_last: whether timesteps are spaced as for one step more, whose last timestep is left out.

    Raises:
        BadInput: there are more steps than timesteps of training.
    """
    more = 1 if without_last else 0
    if steps + more > STEPS:
        raise BadInput(f"steps = {steps}: at most {STEPS - more}")
    if settings.spacing == "trailing":
        return np.round(np.arange(STEPS, 0, -STEPS / steps))[:steps] - 1
    if settings.spacing == "leading":
        grid = np.arange(steps + more)[::-1] * (STEPS // (steps + more)) + settings.offset
    else:
        grid = np.linspace(0, STEPS - 1, steps + more)[::-1]
    return grid[:steps].astype(float)


def beta_points(
    settings: SamplerSettings, timesteps: np.ndarray, strength: float, all_levels: bool = False, whole: bool = True
) -> Points:
    """The points of a model trained with a beta schedule. The ratio sigma/alpha is interpolated between timesteps.

    Args:
        all_levels: whether levels that are respaced (`settings.levels`) range over all timesteps of training, not only over these.
        whole: whether timesteps of respaced levels become whole numbers, as in diffusers: rounded down with levels=exponential, else
            rounded.
    """
    noise: BetaNoise = settings.noise
    places = np.arange(len(noise.ratios))
    ratio = np.interp(timesteps, places, noise.ratios)
    if settings.levels != "timesteps":
        ratio = spread_levels(settings, noise.ratios[::-1] if all_levels else ratio, len(timesteps))
        timesteps = np.interp(np.log(ratio), np.log(noise.ratios), places)
        if whole and settings.levels == "exponential":
            # Because of rounding errors, the first timestep is slightly below 999 in diffusers, and so it becomes 998.
            timesteps = np.maximum(np.floor(timesteps - 1e-6), 0)
        elif whole and noise.curve != "squaredcos_cap_v2":
            timesteps = np.round(timesteps)
    ratio = np.append(ratio, noise.ratios[0] if settings.final == "first" else 0.0)
    alpha = 1 / np.sqrt(ratio * ratio + 1)
    return _from(Points(timesteps, alpha, ratio * alpha, len(timesteps)), strength, False)


def edm_points(settings: SamplerSettings, steps: int, strength: float) -> Points:
    """The points of a model with EDM's noise. Standard deviations are spaced from the largest to the smallest (equation 5 of the
    paper)."""
    noise: EDMNoise = settings.noise
    high, low = noise.sigma_max, noise.sigma_min
    if settings.levels == "exponential":
        # As in diffusers, a single step is at the smallest level.
        s = np.exp(np.linspace(np.log(low), np.log(high), steps))[::-1]
    else:
        s = np.linspace(high ** (1 / noise.rho), low ** (1 / noise.rho), steps) ** noise.rho
    end = low if settings.final == "first" else 0.0
    alpha, sigma = noise.of_deviation(np.append(s, end))
    return _from(Points(np.log(s) / 4, alpha, sigma, steps), strength, False)


def edm_scales(settings: SamplerSettings, at: Points) -> tuple[float, float]:
    """The factors on the initial noise and on the result, for EDM's noise. As in diffusers, the first sample has the variance
    sigma_max^2 + 1, where the paper has sigma_max^2."""
    noise: EDMNoise = settings.noise
    return float(at.alpha[0] * np.sqrt(noise.sigma_max**2 + 1)), float(1 / at.alpha[-1])


def is_edm(settings: SamplerSettings) -> bool:
    """Whether the model was trained with EDM's noise."""
    return isinstance(settings.noise, EDMNoise)


def trained_points(settings: SamplerSettings, timesteps: np.ndarray, end: np.ndarray, strength: float) -> Points:
    """The points at whole timesteps of training.

    Args:
        end: alpha and sigma after the last step.
        strength: the share of the steps to keep.
    """
    alpha, sigma = settings.noise.levels(timesteps)
    points = Points(timesteps, np.append(alpha, end[0]), np.append(sigma, end[1]), len(timesteps))
    return _from(points, strength, False)


def end_level(settings: SamplerSettings) -> np.ndarray:
    """alpha and sigma after the last step, for ddim and similar samplers."""
    return np.array([1.0, 0.0]) if settings.final == "zero" else np.array(settings.noise.levels(np.array(0)))


def is_flow(settings: SamplerSettings) -> bool:
    """Whether the model was trained by flow matching."""
    return isinstance(settings.noise, FlowNoise)


def any_points(settings: SamplerSettings, steps: int, positions: int | None, strength: float, **kind: Any) -> Points:
    """The points of Euler's and Heun's methods, for any kind of noise. `kind` are further arguments of `beta_points`."""
    if is_edm(settings):
        return edm_points(settings, steps, strength)
    if is_flow(settings):
        return flow_points(settings, flow_grid(settings, steps), positions, strength)
    return beta_points(settings, timestep_grid(settings, steps), strength, whole=False, **kind)
