"""Guidance, against sums by hand and diffusers' `rescale_noise_cfg`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.infer.denoise.guidance import Guidance

SHAPE = (3, 2, 2, 4)
WITH, WITHOUT = (jax.random.normal(jax.random.key(i), SHAPE) for i in range(2))
SCALE, T = jnp.array([1.0, 2.0, 7.5]), jnp.float32(500)


def test_the_difference_is_enlarged_by_each_image_s_own_scale():
    guided = Guidance().apply(WITH, WITHOUT, SCALE, T)
    by = np.asarray(SCALE)[:, None, None, None]
    np.testing.assert_allclose(guided, by * np.asarray(WITH) - (by - 1) * np.asarray(WITHOUT), atol=1e-5)


def test_outside_its_interval_it_does_nothing():
    guidance = Guidance(interval=(100.0, 400.0))
    np.testing.assert_array_equal(guidance.apply(WITH, WITHOUT, SCALE, T), WITH)
    assert float(jnp.abs(guidance.apply(WITH, WITHOUT, SCALE, jnp.float32(400)) - WITH).max()) > 1
    # Time steps of EDM are negative where there is little noise.
    np.testing.assert_array_equal(*(Guidance().apply(WITH, WITHOUT, SCALE, jnp.float32(t)) for t in (-1.5, 500)))


def test_zero_star_leaves_nothing_along_the_prediction_without_conditions():
    guided = Guidance(zero_star=True).apply(WITH, WITHOUT, jnp.full(3, 3.0), T)
    for i in range(3):
        with_row, right = (np.asarray(x[i], np.float64).ravel() for x in (WITH, WITHOUT))
        base = right * (with_row @ right) / (right @ right)
        np.testing.assert_allclose(np.asarray(guided[i]).ravel(), base + 3 * (with_row - base), atol=1e-4)
        # Two predictions that point the same way are not enlarged.
    same = Guidance(zero_star=True).apply(WITH, 2 * WITH, jnp.full(3, 3.0), T)
    np.testing.assert_allclose(same, WITH, atol=1e-5)


def test_rescaled_it_keeps_the_spread():
    guided = Guidance(rescale=1.0).apply(WITH, WITHOUT, jnp.full(3, 7.0), T)
    np.testing.assert_allclose(jnp.std(guided, (1, 2, 3)), jnp.std(WITH, (1, 2, 3)), rtol=1e-5)
    half = Guidance(rescale=0.5).apply(WITH, WITHOUT, jnp.full(3, 7.0), T)
    plain = Guidance().apply(WITH, WITHOUT, jnp.full(3, 7.0), T)
    np.testing.assert_allclose(half, (guided + plain) / 2, atol=1e-5)


def test_an_interval_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match="comes first"):
        Guidance(interval=(5.0, 1.0))
