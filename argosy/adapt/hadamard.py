"""Orthogonal matrices whose entries are as even as they can be: Hadamard matrices, scaled.

    H H' = n I, with entries 1 and -1        H_2n = [[H_n, H_n], [H_n, -H_n]]  (Sylvester)

For sizes that are no power of two, H_m of Paley (1933) is taken for a part m of the size: m = q + 1 for a prime q of the form 4k + 3,
m = 2(q + 1) for a prime q of the form 4k + 1. So 12, 20, 24, 28, 36 and 60 times powers of two have one, among them 576 and 960.
Other sizes get a random orthogonal matrix for their odd part.
"""

import numpy as np


def hadamard_rotation(n: int, seed: int) -> tuple[np.ndarray, bool]:
    """An orthogonal matrix [n n] in float64 that spreads each coordinate over all, with random signs (QuaRot, arXiv:2404.00456, section
    3); and whether it is a Hadamard matrix."""
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


def paley_part(n: int) -> tuple[np.ndarray | None, int]:
    """A Hadamard matrix whose size times a power of two is n, and that power; None where Paley gives none."""
    power = n & -n
    while power:
        m = n // power
        if m == 1:
            return np.ones((1, 1)), power
        if m % 4 == 0 and _is_prime(m - 1):
            return _paley_1(m - 1), power
        if m % 4 == 0 and (q := m // 2 - 1) % 4 == 1 and _is_prime(q):
            return _paley_2(q), power
        power //= 2
    return None, 0


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))


def _jacobsthal(q: int) -> np.ndarray:
    """The quadratic characters of i - j modulo a prime."""
    squares = {i * i % q for i in range(1, q)}
    character = np.asarray([0] + [1 if i in squares else -1 for i in range(1, q)], np.float64)
    return character[(np.arange(q)[:, None] - np.arange(q)) % q]


def _bordered(q: int, corner: float) -> np.ndarray:
    out = np.ones((q + 1, q + 1))
    out[0, 0], out[1:, 0], out[1:, 1:] = 0, corner, _jacobsthal(q)
    return out


def _paley_1(q: int) -> np.ndarray:
    return _bordered(q, -1.0) + np.eye(q + 1)


def _paley_2(q: int) -> np.ndarray:
    one = np.asarray([[1.0, 1.0], [1.0, -1.0]])
    two = np.asarray([[1.0, -1.0], [-1.0, -1.0]])
    return np.kron(_bordered(q, 1.0), one) + np.kron(np.eye(q + 1), two)
