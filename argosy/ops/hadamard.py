"""Hadamard matrices, and the product of data with one while a model runs: a fast Walsh-Hadamard transform for any size.

    H H' = n I, with entries 1 and -1        H_2n = [[H_n, H_n], [H_n, -H_n]]  (Sylvester)

A size is a power of two times a part m, and its matrix is the Kronecker product of theirs:

    m = 1                        Sylvester alone
    m = q + 1, m = 2(q + 1)      Paley 1933, for a prime q of the form 4k + 3, and of the form 4k + 1: 12, 20, 24, 28, 36, 60, 140, 148
    any other odd m              the Hartley transform, cos(2 pi ij/m) + sin(2 pi ij/m) (Bracewell 1983): orthogonal, with entries up
                                 to 1.41 in place of 1

QuaRot (arXiv:2404.00456) takes tables of Hadamard matrices for m instead, such as 172 for the 11008 features of Llama 2 7B, where
this file takes 43. No matrix is random, so that stored weights fit on every machine.

The product is computed as two small ones. 1536 features take 80 multiply-adds each, and not 1536.
"""

from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.ops.precision import sums_in

# The largest Hadamard matrix of Paley that a transform multiplies with: 11008 = 2 x 5504 has one, and no fast product.
LARGEST = 512


def hadamard_transform(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """The product of x, along an axis, with an orthogonal matrix that spreads each number over all; summed in float32 at least."""
    kind, shape = sums_in(x.dtype), x.shape
    axis %= x.ndim
    factors = hadamard_factors(shape[axis])
    y = x.reshape(*shape[:axis], *(len(factor) for factor in factors), *shape[axis + 1 :])
    for i, factor in enumerate(factors, axis):
        # Entries are 1 and -1, which bfloat16 has; the scale comes last.
        y = jnp.tensordot(y.astype(x.dtype), jnp.asarray(factor, x.dtype), ((i,), (0,)), preferred_element_type=kind)
        y = jnp.moveaxis(y, -1, i)
    return (y * jnp.asarray(shape[axis] ** -0.5, kind)).reshape(shape).astype(x.dtype)


@lru_cache(maxsize=64)
def hadamard_factors(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Two matrices in float64, each times its transpose a multiple of 1, whose Kronecker product has rows of length sqrt(n).

    Their sizes are as even as the size n allows: one product of 32 and one of 48 are twice as fast as those of 128 and 12.
    """
    matrix, power = paley_part(n, LARGEST)
    if matrix is None:
        power = n & -n
        matrix = _hartley(n // power)
    sizes = [2**i for i in range(power.bit_length())]
    side = min(sizes, key=lambda size: size + n // size)
    return _sylvester(np.ones((1, 1)), side), _sylvester(matrix, power // side)


def is_hadamard_size(n: int) -> bool:
    """Whether the matrix of `hadamard_factors` has entries of one size."""
    return paley_part(n, LARGEST)[0] is not None


def paley_part(n: int, largest: int | None = None) -> tuple[np.ndarray | None, int]:
    """A Hadamard matrix whose size times a power of two is n, and that power; None where Paley gives none, or none up to `largest`."""
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
    """cos + sin of the product of row and column, reduced modulo m while it is a whole number."""
    angle = 2 * np.pi / m * (np.arange(m)[:, None] * np.arange(m) % m)
    return np.cos(angle) + np.sin(angle)


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
    hadamard_2 = np.asarray([[1.0, 1.0], [1.0, -1.0]])
    two = np.asarray([[1.0, -1.0], [-1.0, -1.0]])
    return np.kron(_bordered(q, 1.0), hadamard_2) + np.kron(np.eye(q + 1), two)
