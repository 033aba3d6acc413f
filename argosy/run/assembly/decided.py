"""Resolves "auto" settings for the devices of a run. The choices are stored with the run. A run that resumes on other devices keeps
them, because the alternatives (such as scan and unroll) agree only to rounding.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from argosy.models.parts.stack import Execution, Scan, Unroll
from argosy.parallel.target import Target
from argosy.run.assembly.products import decided_products
from argosy.run.assembly.shared_prompts import decided_sharing
from argosy.run.settings.run import Run
from argosy.train.step import Precision


@dataclass(frozen=True)
class Decided:
    """The resolved "auto" settings of a run.

    layers: whether layers are unrolled or scanned.
    precision: the type of the activations.
    base_dtype: the type of the frozen weights under adapters.
    rounds: the number of rounds of the pipeline (`execution.rounds`).
    products: the implementation of matrix products with weights.
    shared_prompts: whether completions of one prompt share one copy of it in updates.
    winners: the implementations of ops that `argosy autotune` chose, by kind of device and case (`run.assembly.winners`); None if there
        are none.
    """

    layers: Literal["unroll", "scan"]
    precision: Precision
    # The type of frozen weights under an adapter.
    base_dtype: Precision = "float32"
    # In how many arrays scanned layers are stored.
    rounds: int = 1
    # What multiplies with weights (`ops.matmul`). Runs that do not say were made before there was a choice.
    products: str = "xla"
    # Whether answers share prompts in gradients.
    shared_prompts: bool = False
    winners: dict[str, dict[str, str]] | None = None

    @classmethod
    def here(cls, run: Run, target: Target | None = None) -> "Decided":
        """Makes the choices for a run on these devices. The default devices are those of this machine."""
        target = target or Target.here()
        cpu = target.platform == "cpu"
        layers, rounds = run.execution.run, run.execution.rounds
        if layers == "auto":
            unrolls = cpu or (target.platform == "gpu" and target.count == 1)
            unrolls &= getattr(run.model, "layers", 1) <= 32 and not run.mesh.splits("stage") and rounds == 1
            layers = "unroll" if unrolls else "scan"
        precision = run.precision
        if precision == "auto":
            precision = "float32" if cpu else "bfloat16"
        products = decided_products(run, precision, target.count, "cpu" if cpu else "other")
        base = base_dtype(run) if precision == "bfloat16" else "float32"
        return cls(layers, precision, base, rounds, products, decided_sharing(run, target.platform))

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.precision)

    def run(self, remat: Any) -> Execution:
        return Unroll(remat) if self.layers == "unroll" else Scan(remat, self.rounds)


def base_dtype(run: Run) -> Precision:
    """Returns the type of the frozen weights under adapters in a run that computes in bfloat16. It is bfloat16 if all weights of their
    file have that type, otherwise float32, so that no weight is rounded.
    """
    if run.adapter.trains_base or not run.init.weights:
        return "float32"
    if "://" not in run.init.weights and not Path(run.init.weights).exists():
        # A plan names no file, or not yet; published weights are bfloat16.
        return "bfloat16"
    from argosy.checkpoint.open import open_model

    weights = open_model(run.init.weights).weights
    return "bfloat16" if {str(weights.dtype(name)) for name in weights.names} == {"bfloat16"} else "float32"
