"""Euler's and Heun's methods, and Euler's method with fresh noise.

With y = x / c, sampling solves the ODE

    dy/du = (y - D) / u        D: the predicted image

flow     c = 1,      u = sigma
betas    c = alpha,  u = sigma/alpha: Karras et al. 2022 (arXiv:2206.00364)
edm      as betas; heun is algorithm 1 of that paper

euler             has one evaluation for each step. With betas it equals ddim with eta = 0 at other timesteps.
heun              has a second evaluation at the end of each step, and takes the mean of both slopes. The last step is Euler's.
euler_ancestral   goes to a lower level u_down, then adds fresh noise up to the level of the step (k-diffusion). For flows, x is first
                  scaled, so that the image keeps its coefficient (`sample_euler_ancestral_RF` of ComfyUI).

For models with betas, the state here is x, where that of diffusers is y.
"""

import numpy as np

from argosy.infer.denoise.plan import LAST, NEW, SamplerStep, SamplingPlan, X, plan_of
from argosy.infer.denoise.settings import SamplerSettings
from argosy.infer.denoise.timesteps import Points, any_points, edm_scales, is_edm, is_flow


def euler(settings: SamplerSettings, steps: int, positions: int | None = None, strength: float = 1.0) -> SamplingPlan:
    """Makes the plan of Euler's method."""
    at = any_points(settings, steps, positions, strength)
    c, u = _coordinates(settings, at)
    rows = []
    for i in range(len(at)):
        alpha, sigma = at.level(i + 1)
        share = u[i + 1] / u[i]
        move, spread = {X: c[i + 1] / c[i] * share, NEW: c[i + 1] * (1 - share)}, 0.0
        if settings.stochastic:
            # The next sample is the predicted image with fresh noise.
            move, spread = {NEW: alpha}, sigma
        rows.append(SamplerStep(at.timesteps[i], (alpha, sigma), settings.to_sample(*at.level(i)), move, spread=spread))
    return plan_of(rows, at.level(0), _scales(settings, at))


def heun(settings: SamplerSettings, steps: int, positions: int | None = None, strength: float = 1.0) -> SamplingPlan:
    """Makes the plan of Heun's method, with two evaluations for each step except the last."""
    at = any_points(settings, steps, positions, strength)
    c, u = _coordinates(settings, at)
    rows = []
    for i in range(len(at)):
        share = u[i + 1] / u[i]
        move = {X: c[i + 1] / c[i] * share, NEW: c[i + 1] * (1 - share)}
        rows.append(SamplerStep(at.timesteps[i], at.level(i + 1), settings.to_sample(*at.level(i)), move))
        if i + 1 == len(at):
            continue
        # y + (u' - u) / 2 ((y - D) / u + (y_e - D_e) / u'), with y_e where Euler's step ended.
        half, end = (u[i + 1] - u[i]) / 2, c[i + 1]
        last = end / c[i] * (1 + half / u[i])
        move = {LAST: last, NEW + 1: -end * half / u[i], X: half / u[i + 1], NEW: -end * half / u[i + 1]}
        rows.append(SamplerStep(at.timesteps[i + 1], at.level(i + 1), settings.to_sample(*at.level(i + 1)), move))
    return plan_of(rows, at.level(0), _scales(settings, at))


def euler_ancestral(
    settings: SamplerSettings, steps: int, positions: int | None = None, strength: float = 1.0
) -> SamplingPlan:
    """Makes the plan of Euler's method with fresh noise."""
    at = any_points(settings, steps, positions, strength)
    c, u = _coordinates(settings, at)
    rows = []
    for i in range(len(at)):
        now, to = u[i], u[i + 1]
        if is_flow(settings):
            down = to * to / now
            scale = (1 - to) / (1 - down)
            up = np.sqrt(max(to**2 - (down * scale) ** 2, 0))
        else:
            up = np.sqrt(to**2 * (now**2 - to**2) / now**2)
            down, scale = np.sqrt(to**2 - up**2), c[i + 1]
        share = down / now
        move = {X: scale * share / c[i], NEW: scale * (1 - share)}
        spread = float(up * c[i + 1])
        rows.append(
            SamplerStep(at.timesteps[i], at.level(i + 1), settings.to_sample(*at.level(i)), move, spread=spread)
        )
    return plan_of(rows, at.level(0), _scales(settings, at))


def _coordinates(settings: SamplerSettings, at: Points) -> tuple[np.ndarray, np.ndarray]:
    """c and u of each point."""
    return (np.ones(len(at) + 1), at.sigma) if is_flow(settings) else (at.alpha, at.sigma / at.alpha)


def _scales(settings: SamplerSettings, at: Points) -> tuple[float, float]:
    """The factors on the initial noise and on the result. As in diffusers, sampling with betas begins with y = u e, or with x = e if
    spacing=leading."""
    if is_edm(settings):
        return edm_scales(settings, at)
    if is_flow(settings):
        return 1.0, 1.0
    return 1.0 if settings.spacing == "leading" else float(at.sigma[0]), float(1 / at.alpha[-1])
