"""Hadamard matrices, and a fast Walsh-Hadamard transform for any size, with which models rotate data as they run.

    H H' = n I, with entries 1 and -1        H_2n = [[H_n, H_n], [H_n, -H_n]]  (Sylvester)

A size is split into a power of two and a factor m. The matrix is the Kronecker product of the matrices of both:

    m = 1                        Sylvester's matrix only
    m = q + 1, m = 2(q + 1)      Paley 1933, for a prime q of the form 4k + 3, and of the form 4k + 1: 12, 20, 24, 28, 36, 60, 140, 148
    any other odd m              the Hartley transform, cos(2 pi ij/m) + sin(2 pi ij/m) (Bracewell 1983), which is orthogonal and has
                                 entries up to 1.41 instead of 1

QuaRot (arXiv:2404.00456) uses tables of Hadamard matrices for m instead, such as m = 172 for the 11008 features of Llama 2 7B, where
this file uses m = 43. No matrix is random, so stored weights that are rotated to match are valid on every machine.

The product is computed as two small products. 1536 features take 80 multiply-adds each instead of 1536.
"""

from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.ops.precision import sums_in

# The largest Paley matrix that a transform uses. For example, 11008 = 2 x 5504 has one of size 5504, whose product would not be fast.
LARGEST = 512


def hadamard_transform(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Multiplies x, along an axis, with an orthogonal matrix that spreads each number over all. Sums in float32 at least."""
    kind, shape = sums_in(x.dtype), x.shape
    axis %= x.ndim
    factors = hadamard_factors(shape[axis])
    y = x.reshape(*shape[:axis], *(len(factor) for factor in factors), *shape[axis + 1 :])
    for i, factor in enumerate(factors, axis):
        # Entries are 1 and -1, which are exact in bfloat16. The scale is applied last.
        y = jnp.tensordot(y.astype(x.dtype), jnp.asarray(factor, x.dtype), ((i,), (0,)), preferred_element_type=kind)
        y = jnp.moveaxis(y, -1, i)
    return (y * jnp.asarray(shape[axis] ** -0.5, kind)).reshape(shape).astype(x.dtype)


@lru_cache(maxsize=64)
def hadamard_factors(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns two orthogonal matrices, up to a factor, in float64. Their Kronecker product is n x n and has rows of length sqrt(n).

    The two sizes are as close to each other as n allows. Products with 32 and 48 are twice as fast as with 128 and 12.
    """
    matrix, power = paley_part(n, LARGEST)
    if matrix is None:
        power = n & -n
        matrix = _hartley(n // power)
    sizes = [2**i for i in range(power.bit_length())]
    side = min(sizes, key=lambda size: size + n // size)
    return _sylvester(np.ones((1, 1)), side), _sylvester(matrix, power // side)


def is_hadamard_size(n: int) -> bool:
    """Whether the matrix of `hadamard_factors` is a Hadamard matrix, with entries 1 and -1 only."""
    return paley_part(n, LARGEST)[0] is not None


def paley_part(n: int, largest: int | None = None) -> tuple[np.ndarray | None, int]:
    """Returns a Hadamard matrix by Paley, and the power of two by which its size must be multiplied to be n.

    (None, 0) if there is no such matrix, or none of size at most `largest`.
    """
    power = n & -n
    while power:
        m = n // power
        if largest is not None and m > largest:
            break
        if m == 1:
            return np.ones((1, 1)), power
        if m % 4 == 0 and _is_prime(m - 1):
            return _paley_1(m - 1), power
        if m % 4 == 0 and (q := m // 2 - 1) % 4 == 1 and _is_prime(q):
            return _paley_2(q), power
        power //= 2
    return None, 0


def _sylvester(matrix: np.ndarray, power: int) -> np.ndarray:
    while power > 1:
        matrix, power = np.block([[matrix, matrix], [matrix, -matrix]]), power // 2
    return matrix


def _hartley(m: int) -> np.ndarray:
    """Returns the Hartley matrix, cos + sin of 2 pi ij/m. The integers ij are reduced modulo m first, for precision."""
    angle = 2 * np.pi / m * (np.arange(m)[:, None] * np.arange(m) % m)
    return np.cos(angle) + np.sin(angle)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))


def _jacobsthal(q: int) -> np.ndarray:
    """Returns the Jacobsthal matrix, the quadratic characters of i - j modulo a prime q."""
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
    hadamard_2 = np.asarray([[1.0, 1.0], [1.0, -1.0]])
    two = np.asarray([[1.0, -1.0], [-1.0, -1.0]])
    return np.kron(_bordered(q, 1.0), hadamard_2) + np.kron(np.eye(q + 1), two)
