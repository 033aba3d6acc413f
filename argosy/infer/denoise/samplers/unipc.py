"""UniPC: a predictor of the next sample, and a corrector that improves it with the network's prediction there. Orders 1 to 3.

    corrector   x_i   = sigma/sigma_b x_b - alpha B (D_b + sum rho_k (D_k - D_b) / r_k + rho (D_i - D_b))
    predictor   x_i+1 = sigma'/sigma x_i - alpha' B (D_i + sum rho_k (D_k - D_i) / r_k)

Here B = exp(-h) - 1. x_b and D_b are the sample and the prediction of the step before, and D_k the predictions of steps before that
one, with distance r_k h in lambda. The weights rho solve sum rho_k r_k^(n-1) = n! phi_(n+1)(-h) h / B for n = 1..order. Zhao et al.
2023 (arXiv:2302.04867), variant bh2. The order of the last steps is at most the number of steps that are left. This is Wan's sampler.
"""

from math import factorial

import numpy as np

from argosy.infer.denoise.plan import LAST, NEW, SamplerStep, SamplingPlan, X, plan_of
from argosy.infer.denoise.samplers.dpm import with_whole_timesteps
from argosy.infer.denoise.settings import SamplerSettings
from argosy.infer.denoise.timesteps import Points, beta_points, flow_points, is_flow, timestep_grid
from argosy.models.diffusion.noise import STEPS

# As in diffusers, the first noise level of flow models is below 1 by at least this.
BELOW = 1e-6


def unipc(settings: SamplerSettings, steps: int, positions: int | None = None, strength: float = 1.0) -> SamplingPlan:
    """Makes the plan of UniPC."""
    at = _points(settings, steps, positions, strength)
    log_ratio, rows = at.log_ratio, []
    before = 1
    for i in range(len(at)):
        order = min(settings.order, i + 1)
        if settings.lower_order_final:
            order = min(order, len(at) - i)
        if not np.isfinite(log_ratio[i + 1]):
            order = 1
        # The weights of this step's sample: x itself at the first step, later the corrected sample.
        keep = {X: 1.0} if i == 0 else _corrected(at, log_ratio, i, before)
        move = _combined(keep, _predicted(at, log_ratio, i, order))
        read = settings.to_sample(*at.level(i))
        rows.append(SamplerStep(at.timesteps[i], at.level(i + 1), read, move, keep))
        before = order
    return plan_of(rows, at.level(0))


def _predicted(at: Points, log_ratio: np.ndarray, i: int, order: int) -> tuple[float, dict[int, float]]:
    """The predictor: the weight of the sample of step i in the next sample, and those of predictions, by index in the plan's list."""
    h = log_ratio[i + 1] - log_ratio[i]
    ratios = [(log_ratio[i - k] - log_ratio[i]) / h for k in range(1, order)]
    # At order 2 the weight is 1/2, its limit for small steps.
    rho = np.array([0.5]) if order == 2 else _weights(ratios, h)
    grown = -at.alpha[i + 1] * np.expm1(-h)
    weights = {NEW: grown * (1 - sum(p / r for p, r in zip(rho, ratios, strict=True)))}
    weights |= {NEW + k: grown * p / r for k, (p, r) in enumerate(zip(rho, ratios, strict=True), 1)}
    return float(at.sigma[i + 1] / at.sigma[i]), weights


def _corrected(at: Points, log_ratio: np.ndarray, i: int, order: int) -> dict[int, float]:
    """The corrector: the weights of the corrected sample of step i, by index in the plan's list."""
    h = log_ratio[i] - log_ratio[i - 1]
    ratios = [(log_ratio[i - 1 - k] - log_ratio[i - 1]) / h for k in range(1, order)]
    rho = np.array([0.5]) if order == 1 else _weights([*ratios, 1.0], h)
    grown = -at.alpha[i] * np.expm1(-h)
    base = 1 - rho[-1] - sum(p / r for p, r in zip(rho, ratios, strict=False))
    weights = {LAST: float(at.sigma[i] / at.sigma[i - 1]), NEW: grown * rho[-1], NEW + 1: grown * base}
    return weights | {NEW + 1 + k: grown * p / r for k, (p, r) in enumerate(zip(rho, ratios, strict=False), 1)}


def _weights(ratios: list[float], h: float) -> np.ndarray:
    """The weights rho, which solve as many conditions as there are ratios."""
    n = len(ratios)
    if not n:
        return np.zeros(0)
    scale, phi = np.expm1(-h), np.expm1(-h) / -h - 1
    right = []
    for k in range(1, n + 1):
        right.append(phi * factorial(k) / scale)
        phi = phi / -h - 1 / factorial(k + 1)
    return np.linalg.solve(np.stack([np.power(ratios, k) for k in range(n)]), np.array(right))


def _combined(keep: dict[int, float], step: tuple[float, dict[int, float]]) -> dict[int, float]:
    """Substitutes the weights of the kept sample into those of a step. Returns the weights by index in the plan's list."""
    of_sample, weights = step
    places = {*keep, *weights}
    return {place: of_sample * keep.get(place, 0.0) + weights.get(place, 0.0) for place in sorted(places)}


def _points(settings: SamplerSettings, steps: int, positions: int | None, strength: float) -> Points:
    if not is_flow(settings):
        return beta_points(settings, np.round(timestep_grid(settings, steps, without_last=True)), strength, all_levels=True)
    at = with_whole_timesteps(flow_points(settings, np.linspace(1, 1 / STEPS, steps + 1)[:-1], positions, strength))
    sigma = np.minimum(at.sigma, 1 - BELOW)
    return Points(np.minimum(at.timesteps, np.floor(sigma[:-1] * STEPS)), 1 - sigma, sigma, at.total)
