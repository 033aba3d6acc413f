"""Logits of models that are deep or recurrent, in float64 on both sides: rounding no longer hides what is a mistake.

In float32 the state's rounding grows with depth and length, on both sides; here equal functions agree to 1e-13, and a term forgotten
does not.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_weights import write_model
from helpers import relative

import argosy
from argosy.models.parts.attention.attend import Packed
from argosy.models.parts.weight import merge, split

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
NAMES = [path.parent.name for path in sorted(GOLDENS.glob("*/golden.npz")) if "double" in np.load(path)]


def test_there_are_some():
    assert len(NAMES) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_in_float64(name: str, tmp_path: Path):
    folder, golden = write_model(GOLDENS / name, tmp_path / name), dict(np.load(GOLDENS / name / "golden.npz"))
    tokens = jnp.asarray(golden["tokens"][:1], jnp.int32)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        graph, weights = split(argosy.load(folder, dtype="float64").module)

        def forward(weights):
            model = merge(graph, weights)
            model.dtype = jnp.float64
            return model(tokens, Packed(jnp.ones_like(tokens)))[0]

        logits = np.asarray(jax.jit(forward)({name: jnp.asarray(w, jnp.float64) for name, w in weights.items()}))
    assert logits.dtype == np.float64
    assert relative(logits, golden["double"]) < 1e-12
    assert relative(golden["logits"][:1], golden["double"]) > 1e-8, "float32 already is that near: nothing is asked here"
