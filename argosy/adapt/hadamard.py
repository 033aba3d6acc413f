"""Makes rotation matrices for weights: Hadamard matrices (`ops.hadamard`) with random signs.

A size without a Hadamard matrix of Sylvester and Paley gets a random orthogonal matrix for its odd factor.
"""

import numpy as np

from argosy.ops.hadamard import paley_part


def hadamard_rotation(n: int, seed: int) -> tuple[np.ndarray, bool]:
    """Returns an orthogonal matrix [n n] in float64 with random signs that spreads each coordinate over all coordinates (QuaRot,
    arXiv:2404.00456, section 3), and whether it is a Hadamard matrix."""
    rng = np.random.default_rng(seed)
    matrix, power = paley_part(n)
    is_hadamard = matrix is not None
    if matrix is None:
        power = n & -n
        # The signs of R's diagonal make the draw uniform (Mezzadri 2007, arXiv:math-ph/0609050).
        q, r = np.linalg.qr(rng.standard_normal((n // power, n // power)))
        matrix = q * np.sign(np.diag(r)) * (n // power) ** 0.5
    while power > 1:
        matrix, power = np.block([[matrix, matrix], [matrix, -matrix]]), power // 2
    return matrix * rng.choice([-1.0, 1.0], n)[:, None] / n**0.5, is_hadamard
