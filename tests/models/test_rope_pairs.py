"""Neighboring features turned by a product, as TPUs do it, against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.models.parts.attention import rope


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_form_for_tpus_is_the_plain_one(dtype: str, monkeypatch: pytest.MonkeyPatch):
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.standard_normal((2, 5, 3, 12)), dtype)
    angle = jnp.asarray(draw.standard_normal((2, 5, 1, 6)), jnp.float32)
    inputs = x, jnp.cos(angle), jnp.sin(angle)

    def both(name: str) -> tuple[jax.Array, jax.Array]:
        monkeypatch.setattr(rope, "platform", lambda: name)
        y, back = jax.vjp(lambda x: rope.turn_neighbors(x, *inputs[1:]), x)
        return y, back(y**2)[0]

    # The parts of a gradient are rounded to the type of the features before they are added.
    exact = (2**-20, 2**-20 if dtype == "float32" else 2**-6)
    for plain, product, near in zip(both("cpu"), both("tpu"), exact, strict=True):
        assert plain.dtype == product.dtype
        largest = float(jnp.abs(plain).max())
        np.testing.assert_allclose(np.asarray(product, np.float32), np.asarray(plain, np.float32), rtol=0, atol=near * largest)
    first = np.asarray(x, np.float32)[..., 0] * np.cos(angle)[..., 0] - np.asarray(x, np.float32)[..., 1] * np.sin(angle)[..., 0]
    np.testing.assert_allclose(np.asarray(both("tpu")[0])[..., 0], first, rtol=1e-5, atol=1e-6)


def test_the_product_keeps_all_digits_on_tpus(monkeypatch: pytest.MonkeyPatch):
    """Their matrix units round to bfloat16 unless they are told not to."""
    monkeypatch.setattr(rope, "platform", lambda: "tpu")
    x, angle = jnp.ones((1, 2, 1, 4)), jnp.ones((1, 2, 1, 2))
    products = [eqn for eqn in jax.make_jaxpr(rope.turn_neighbors)(x, angle, angle).eqns if "dot_general" in str(eqn)]
    assert products
    assert all("HIGHEST" in str(eqn) for eqn in products)
