"""DDIM and DDPM, at whole timesteps of a model trained with a beta schedule.

    e = (x - alpha D) / sigma                                  D: the predicted image
    ddim    x' = alpha' D + sqrt(sigma'^2 - s^2) e + s z       s = eta sigma'/sigma sqrt(1 - (alpha/alpha')^2)
    ddpm    x' = alpha' beta / sigma^2 D + (alpha/alpha') sigma'^2 / sigma^2 x + s z        beta = 1 - (alpha/alpha')^2
            s^2 = beta sigma'^2 / sigma^2 (variance = small), or beta (large)

Song et al. 2020 (arXiv:2010.02502); Ho et al. 2020 (arXiv:2006.11239). As in diffusers, `clip` clips D but not e. A step of DDIM goes
back by 1000 // steps timesteps, a step of DDPM to the next timestep of its list.
"""

import numpy as np

from argosy.infer.denoise.plan import NEW, RAW, SamplerStep, SamplingPlan, X, plan_of
from argosy.infer.denoise.settings import SamplerSettings
from argosy.infer.denoise.timesteps import Points, end_level, timestep_grid, trained_points
from argosy.models.diffusion.noise import STEPS


def ddim(settings: SamplerSettings, steps: int, positions: int | None = None, strength: float = 1.0) -> SamplingPlan:
    """Makes the plan of DDIM. With eta = 1 it adds as much fresh noise as DDPM."""
    at = trained_points(settings, np.round(timestep_grid(settings, steps)), end_level(settings), strength)
    rows = []
    for i in range(len(at)):
        (alpha, sigma), (alpha_to, sigma_to) = at.level(i), _back(settings, at, i, STEPS // steps)
        spread = settings.eta * sigma_to / sigma * np.sqrt(max(1 - (alpha / alpha_to) ** 2, 0.0))
        along = np.sqrt(max(sigma_to**2 - spread**2, 0.0)) / sigma
        move = {X: along, RAW: -along * alpha, NEW: alpha_to}
        read = settings.to_sample(alpha, sigma)
        rows.append(SamplerStep(at.timesteps[i], (alpha_to, sigma_to), read, move, spread=float(spread)))
    return plan_of(rows, at.level(0), clip=settings.clip)


def ddpm(settings: SamplerSettings, steps: int, positions: int | None = None, strength: float = 1.0) -> SamplingPlan:
    """Makes the plan of DDPM, which samples from the posterior of each step."""
    at = trained_points(settings, np.round(timestep_grid(settings, steps)), np.array([1.0, 0.0]), strength)
    rows = []
    for i in range(len(at)):
        (alpha, sigma), (alpha_to, sigma_to) = at.level(i), at.level(i + 1)
        beta, ratio = 1 - (alpha / alpha_to) ** 2, (sigma_to / sigma) ** 2
        move = {NEW: alpha_to * beta / sigma**2, X: alpha / alpha_to * ratio}
        variance = beta if settings.variance == "large" else max(beta * ratio, 1e-20)
        spread = float(np.sqrt(variance)) if at.timesteps[i] > 0 else 0.0
        read = settings.to_sample(alpha, sigma)
        rows.append(SamplerStep(at.timesteps[i], (alpha_to, sigma_to), read, move, spread=spread))
    return plan_of(rows, at.level(0), clip=settings.clip)


def _back(settings: SamplerSettings, at: Points, i: int, by: int) -> tuple[float, float]:
    """alpha and sigma at the timestep that is `by` below that of point i."""
    to = at.timesteps[i] - by
    if to < 0:
        return at.level(len(at))
    alpha, sigma = settings.noise.levels(to)
    return float(alpha), float(sigma)
