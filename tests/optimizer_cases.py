"""Weights and gradients of 20 steps on which optimizers are compared with their references. NumPy only: what makes the goldens, with
torch and no Argosy, reads it too.

The matrix is square, because the preconditioners of a wide one are singular in the first steps, and any basis of their null space is
right.
"""

import numpy as np

STEPS, SHAPES = 20, {"w": (6, 6), "b": (6,)}
# After so many steps weights are compared.
AFTER = (1, 2, 7, 20)


def start() -> dict[str, np.ndarray]:
    """The initial weights."""
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def gradient(step: int, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The gradient at the weights in a step, counted from 0: that of a noisy quadratic."""
    rng = np.random.default_rng(100 + step)
    return {name: 0.5 * weights[name] + rng.standard_normal(shape) for name, shape in SHAPES.items()}
