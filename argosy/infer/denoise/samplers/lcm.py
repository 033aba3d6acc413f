"""Latent consistency models: each step predicts the image, and mixes it with fresh noise at the next level.

    D~ = skip x + out D        skip = 1/4 / (r^2 + 1/4), out = r / sqrt(r^2 + 1/4), r = timestep_scaling t
    x' = alpha' D~ + sigma' z, at the end D~

Luo et al. 2023 (arXiv:2310.04378). The timesteps are spaced over the `original_steps` timesteps of the distillation.
"""

import numpy as np

from argosy.core.errors import BadInput
from argosy.infer.denoise.plan import NEW, SamplerStep, SamplingPlan, X, plan_of
from argosy.infer.denoise.settings import SamplerSettings
from argosy.infer.denoise.timesteps import trained_points
from argosy.models.diffusion.noise import STEPS

DATA = 0.5


def lcm(settings: SamplerSettings, steps: int, positions: int | None = None, strength: float = 1.0) -> SamplingPlan:
    """Makes the plan of a latent consistency model.

    Raises:
        BadInput: there are more steps than the distillation had.
    """
    taught = np.arange(1, int(settings.original_steps * strength) + 1) * (STEPS // settings.original_steps) - 1
    if steps > len(taught):
        raise BadInput(f"steps = {steps} of a model distilled in {len(taught)} steps")
    indexes = np.floor(np.linspace(0, len(taught), steps, endpoint=False)).astype(int)
    at = trained_points(settings, taught[::-1][indexes].astype(float), np.array([1.0, 0.0]), 1.0)
    rows = []
    for i in range(steps):
        scaled = at.timesteps[i] * settings.timestep_scaling
        skip, out = DATA**2 / (scaled**2 + DATA**2), scaled / np.sqrt(scaled**2 + DATA**2)
        alpha, sigma = at.level(i + 1)
        read = settings.to_sample(*at.level(i))
        move = {X: alpha * skip, NEW: alpha * out}
        rows.append(SamplerStep(at.timesteps[i], (alpha, sigma), read, move, spread=sigma))
    return plan_of(rows, at.level(0), clip=settings.clip)
