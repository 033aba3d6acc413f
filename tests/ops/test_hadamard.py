"""The Walsh-Hadamard transform beside numpy's Fourier transforms, and Paley's sizes by their definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

from argosy.ops import hadamard
from argosy.ops.hadamard import hadamard_factors, is_hadamard_size

hadamard_transform = jax.jit(hadamard.hadamard_transform, static_argnums=1)


@pytest.mark.parametrize("n", [1, 2, 8, 128, 5, 43, 172, 70])
def test_it_is_the_fourier_transform_of_a_power_of_two_and_an_odd_part(n):
    """That of two numbers is [[1, 1], [1, -1]], and cos + sin is the real part less the imaginary one."""
    power = n & -n
    x = np.random.default_rng(0).standard_normal((3, n))
    grid = (2,) * (power.bit_length() - 1) + (n // power,)
    whole = np.fft.fftn(x.reshape(3, *grid), axes=range(1, 1 + len(grid))).reshape(3, n)
    assert relative(hadamard_transform(x.astype(np.float32)), (whole.real - whole.imag) / n**0.5) < 1e-6
    assert is_hadamard_size(n) == (n == power)


@pytest.mark.parametrize("n", [12, 20, 28, 140, 148, 576, 1536])
def test_sizes_of_paley_have_entries_of_one_size(n):
    matrix = np.asarray(hadamard_transform(np.eye(n, dtype=np.float32)))
    assert is_hadamard_size(n)
    np.testing.assert_allclose(np.abs(matrix), n**-0.5, rtol=1e-5)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(n), atol=1e-5)


@pytest.mark.parametrize("n", [1536, 8960, 11008, 14336, 18944, 28672])
def test_widths_of_large_models_take_two_small_products(n):
    left_size, right = map(len, hadamard_factors(n))
    assert left_size * right == n
    assert left_size + right < 3 * n**0.5


def test_any_axis_in_half_precision_and_its_gradient():
    x = jax.random.normal(jax.random.key(0), (4, 12, 8))
    y = hadamard_transform(x, -2)
    np.testing.assert_allclose(y, jnp.swapaxes(hadamard_transform(jnp.swapaxes(x, 1, 2)), 1, 2), atol=1e-6)
    half = hadamard_transform(x.astype(jnp.bfloat16), -2)
    assert half.dtype == jnp.bfloat16
    assert relative(np.asarray(half, np.float32), y) < 2e-2
    # It keeps lengths, and so does its transpose.
    pulled = jax.vjp(lambda x: hadamard_transform(x, 1), x)[1](y)[0]
    np.testing.assert_allclose(pulled, x, atol=1e-5)
