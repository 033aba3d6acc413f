"""Bundles for tests: small ones, a process that may import no model, and manifests that an attacker would write."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.export.function import export_function

# Opens bundles where nothing of the models can be imported, and writes what they give.
ALONE = """
import json, sys
import numpy as np

class Banned:
    NAMES = ("flax", "optax", "orbax", "grain", "tensorstore", "argosy.models", "argosy.infer", "argosy.adapt", "argosy.checkpoint")

    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in self.NAMES):
            raise ImportError(f"{name} is banned here")

sys.meta_path.insert(0, Banned())
from argosy.export.bundle import Bundle

for line in sys.stdin:
    job = json.loads(line)
    bundle = Bundle.open(job["bundle"])
    inputs = dict(np.load(job["inputs"], allow_pickle=False)) if job["inputs"] else job["plain"]
    found = bundle.run(inputs, job["signature"])
    np.savez(job["outputs"], **{name: np.asarray(value) for name, value in found.items()})
assert not [name for name in sys.modules if any(name == one or name.startswith(one + ".") for one in Banned.NAMES)]
print("done")
"""


def run_alone(jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, np.ndarray]]:
    """The outputs of bundles in a process of their own, under an import ban.

    Args:
        jobs: each with `bundle`, `inputs` (arrays by name, or lists and texts) and perhaps `signature`.
    """
    lines = []
    for i, job in enumerate(jobs):
        arrays = all(isinstance(value, np.ndarray) for value in job["inputs"].values())
        if arrays:
            np.savez(folder / f"in{i}.npz", **job["inputs"])
        line = {"inputs": str(folder / f"in{i}.npz") if arrays else None, "plain": None if arrays else job["inputs"]}
        line |= {"bundle": str(job["bundle"]), "signature": job.get("signature"), "outputs": str(folder / f"out{i}.npz")}
        lines.append(json.dumps(line))
    # The cache of programs and strict promotion are settings of the tests' own process.
    done = subprocess.run(
        [sys.executable, "-c", ALONE], input="\n".join(lines), capture_output=True, text=True, timeout=300, env=dict(os.environ)
    )
    assert done.stdout == "done\n", done.stderr[-3000:]
    return [dict(np.load(folder / f"out{i}.npz", allow_pickle=False)) for i in range(len(jobs))]


def small_bundle(folder: Path, **options: Any) -> Path:
    """A bundle of a function with weights: [batch 3] float32 -> [batch 40]."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(3, 400)).astype(np.float32))

    def scores(x: Any, gain: Any) -> Any:
        return {"scores": jnp.sin(x @ table) * gain[:, None]}

    export_function(scores, (jnp.zeros((1, 3)), jnp.zeros(1)), folder, **({"platforms": ["cpu"], "batch": "symbolic"} | options))
    return folder


def rewrite_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest and makes its hash right again, as one who may write the bundle can."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    edit(content)
    path.write_text(text_of_manifest(content))


def text_of_manifest(content: Mapping[str, Any]) -> str:
    """The text of a manifest as docs/guides/bundles.md says it."""
    def text(value: Any) -> str:
        return json.dumps(value, indent=1, sort_keys=True) + "\n"

    return text(dict(content) | {"sha256": hashlib.sha256(text(content).encode()).hexdigest()})


def record_of(path: Path) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
