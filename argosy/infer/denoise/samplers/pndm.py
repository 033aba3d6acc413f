"""PNDM without its Runge-Kutta start (PLMS): a step of DDIM along a combination of up to four noise predictions.

    x' = (alpha'/alpha) x - (alpha'^2 - alpha^2) e / (alpha^2 sigma' + alpha sigma alpha')

    e = (55 e_0 - 59 e_1 + 37 e_2 - 9 e_3) / 24, with fewer predictions in the first steps

Liu et al. 2022 (arXiv:2202.09778). The first step is taken twice, the second time with the mean of both predictions. This is the
default sampler in the folders of Stable Diffusion 1.
"""

import numpy as np

from argosy.infer.denoise.plan import LAST, NEW, SamplerStep, SamplingPlan, X, plan_of
from argosy.infer.denoise.settings import SamplerSettings
from argosy.infer.denoise.timesteps import end_level, timestep_grid, trained_points
from argosy.models.diffusion.noise import STEPS

# Weights of the predictions, the newest first, by their number.
ADAMS = {1: (1.0,), 2: (3 / 2, -1 / 2), 3: (23 / 12, -16 / 12, 5 / 12), 4: (55 / 24, -59 / 24, 37 / 24, -9 / 24)}


def pndm(settings: SamplerSettings, steps: int, positions: int | None = None, strength: float = 1.0) -> SamplingPlan:
    """Makes the plan of PLMS."""
    at = trained_points(settings, np.round(timestep_grid(settings, steps)), end_level(settings), strength)
    back = STEPS // steps
    # The second evaluation is at the end of the first step, which is then taken again.
    evaluations = [*at.timesteps[:1], *at.timesteps[1:2], *at.timesteps[1:]]
    rows = []
    for i, timestep in enumerate(evaluations):
        again = i == 1
        here, to = (timestep + back, timestep) if again else (timestep, timestep - back)
        level, next_level = settings.noise.levels(here), settings.noise.levels(to) if to >= 0 else at.level(len(at))
        # The prediction of the second evaluation is not used in later steps.
        if again:
            weights = {NEW: 0.5, NEW + 1: 0.5}
        else:
            weights = {NEW + j + (1 if j >= i - 1 and i else 0): w for j, w in enumerate(ADAMS[min(max(i, 1), 4)])}
        of_x, of_e = _step(level, next_level)
        base = LAST if again else X
        # A prediction of v is converted to noise by the level and the sample that is moved.
        inner, outer = (level[1], level[0]) if settings.prediction == "v" else (0.0, 1.0)
        move = {base: of_x + of_e * inner * sum(weights.values())}
        move |= {place: of_e * outer * weight for place, weight in weights.items()}
        rows.append(SamplerStep(timestep, (float(next_level[0]), float(next_level[1])), (0.0, 1.0), move))
    return plan_of(rows, at.level(0))


def _step(level: tuple[float, float], to: tuple[float, float]) -> tuple[float, float]:
    """The weights of the sample and of the noise in a step from one level (alpha and sigma) to another."""
    (a, s), (b, r) = level, to
    return float(b / a), float(-(b * b - a * a) / (a * a * r + a * s * b))
