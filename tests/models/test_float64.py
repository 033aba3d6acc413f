"""Models whose layers recur, in float64 on both sides: rounding no longer hides what is a mistake.

In float32 the state's rounding grows with depth and length, on both sides; here equal functions agree to 1e-13, and
a term forgotten does not. Runs in a process of its own, in which `jnp.float32` means float64, so that norms, decays and
routers are computed so as well.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from golden_weights import write_model
from helpers import relative

GOLDENS = Path(__file__).parents[1] / "goldens" / "models"
NAMES = [path.parent.name for path in sorted(GOLDENS.glob("*/golden.npz")) if "double" in np.load(path)]

PROGRAM = """
import sys
import jax.numpy as jnp
import numpy as np

jnp.float32 = jnp.float64
import argosy
from argosy.models.parts.attend import Packed
from argosy.models.parts.weight import merge, split
from argosy.ops import grouped

grouped.PREFERENCE.clear()  # the products that have no float64

folder, tokens, out = sys.argv[1:]
model = argosy.load(folder, dtype="float64").module
graph, weights = split(model)


def logits(weights, tokens):
    model = merge(graph, weights)
    model.dtype = jnp.float64
    return model(tokens, Packed(jnp.ones_like(tokens)))[0]


np.save(out, logits({name: jnp.asarray(w, jnp.float64) for name, w in weights.items()}, jnp.asarray(np.load(tokens))))
"""


def test_there_are_some():
    assert len(NAMES) >= 3


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n.endswith("deep") else pytest.mark.slow) for n in NAMES])
def test_logits_in_float64(name: str, tmp_path: Path):
    folder, golden = write_model(GOLDENS / name, tmp_path / name), np.load(GOLDENS / name / "golden.npz")
    np.save(tmp_path / "tokens.npy", golden["tokens"][:1].astype(np.int32))
    words = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "tokens.npy"), str(tmp_path / "logits.npy")]
    set_up = os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    done = subprocess.run(words, env=set_up, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    logits = np.load(tmp_path / "logits.npy")
    assert logits.dtype == np.float64
    assert relative(logits, golden["double"]) < 1e-12
    assert relative(golden["logits"][:1], golden["double"]) > 1e-8, "float32 already is that near: nothing is asked here"
