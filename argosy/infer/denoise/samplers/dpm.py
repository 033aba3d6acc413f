"""DPM-Solver++, the second-order multistep method, as an ODE or an SDE.

    h = lambda' - lambda,  r = (lambda - lambda_before) / h,  E = D + (D - D_before) / (2 r)
    ODE    x' = sigma'/sigma x - alpha' (exp(-h) - 1) E
    SDE    x' = sigma'/sigma exp(-h) x + alpha' (1 - exp(-2 h)) E + sigma' sqrt(1 - exp(-2 h)) z

Lu et al. 2022 (arXiv:2211.01095), the midpoint variant. The first step is of first order, and so is the last if it ends without noise.
"""

import numpy as np

from argosy.infer.denoise.plan import NEW, SamplerStep, SamplingPlan, X, plan_of
from argosy.infer.denoise.settings import SamplerSettings
from argosy.infer.denoise.timesteps import (
    Points,
    beta_points,
    edm_points,
    edm_scales,
    flow_points,
    is_edm,
    is_flow,
    timestep_grid,
)
from argosy.models.diffusion.noise import STEPS

# With fewer steps than this, the last step has first order (`lower_order_final`).
FEW = 15


def dpmpp_2m(settings: SamplerSettings, steps: int, positions: int | None = None, strength: float = 1.0) -> SamplingPlan:
    """Makes the plan of DPM-Solver++(2M)."""
    at = _points(settings, steps, positions, strength)
    log_ratio, rows = at.log_ratio, []
    for i in range(len(at)):
        (_, sigma), (alpha_to, sigma_to) = at.level(i), at.level(i + 1)
        h = log_ratio[i + 1] - log_ratio[i]
        if settings.stochastic:
            along, grown = sigma_to / sigma * np.exp(-h), alpha_to * -np.expm1(-2 * h)
            spread = float(sigma_to * np.sqrt(-np.expm1(-2 * h)))
        else:
            along, grown, spread = sigma_to / sigma, -alpha_to * np.expm1(-h), 0.0
        move = {X: along, NEW: grown}
        ends_low = i == len(at) - 1 and (
            settings.euler_at_final or settings.final == "zero" or (settings.lower_order_final and at.total < FEW)
        )
        if settings.order == 2 and i and not ends_low:
            slope = h / (2 * (log_ratio[i] - log_ratio[i - 1]))
            move |= {NEW: grown * (1 + slope), NEW + 1: -grown * slope}
        read = settings.to_sample(*at.level(i))
        rows.append(SamplerStep(at.timesteps[i], (alpha_to, sigma_to), read, move, spread=spread))
    return plan_of(rows, at.level(0), edm_scales(settings, at) if is_edm(settings) else (1.0, 1.0))


def _points(settings: SamplerSettings, steps: int, positions: int | None, strength: float) -> Points:
    """The points of the solver. As in diffusers, flow models begin at 1 - 1/1000 and get whole timesteps."""
    if is_edm(settings):
        return edm_points(settings, steps, strength)
    if is_flow(settings):
        return with_whole_timesteps(flow_points(settings, np.linspace(1 - 1 / STEPS, 0, steps + 1)[:-1], positions, strength))
    return beta_points(settings, np.round(timestep_grid(settings, steps, without_last=True)), strength, all_levels=True)


def with_whole_timesteps(at: Points) -> Points:
    """Rounds the timesteps down to whole numbers. Noise levels are not changed."""
    return Points(np.floor(at.timesteps), at.alpha, at.sigma, at.total)
