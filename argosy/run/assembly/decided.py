"""What "auto" means on the devices of a run. It is decided once and stored with the run: one that resumes elsewhere keeps its first
choice, because scan and unroll agree only to rounding.
"""

import os
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from argosy.core.errors import BadInput
from argosy.models.parts.stack import Execution, Scan, Unroll
from argosy.run.assembly.products import decided_products
from argosy.run.assembly.shared_prompts import decided_sharing
from argosy.run.settings.run import Run
from argosy.train.step import Precision


@dataclass(frozen=True)
class Decided:
    """What "auto" means on these devices."""

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

    @classmethod
    def here(cls, run: Run) -> "Decided":
        cpu = backend() == "cpu"
        layers, rounds = run.execution.run, run.execution.rounds
        if layers == "auto":
            unrolls = cpu or (backend() == "gpu" and jax.device_count() == 1)
            unrolls &= run.model.layers <= 32 and not run.mesh.splits("stage") and rounds == 1
            layers = "unroll" if unrolls else "scan"
        precision = run.precision
        if precision == "auto":
            precision = "float32" if cpu else "bfloat16"
        products = decided_products(run, precision, jax.device_count(), "cpu" if cpu else "other")
        base = base_dtype(run) if precision == "bfloat16" else "float32"
        return cls(layers, precision, base, rounds, products, decided_sharing(run, backend()))

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.precision)

    def run(self, remat: Any) -> Execution:
        return Unroll(remat) if self.layers == "unroll" else Scan(remat, self.rounds)


def base_dtype(run: Run) -> Precision:
    """The type of frozen weights in a run that computes in bfloat16: bfloat16 if their file has no more bits, float32 otherwise, so
    that nothing is rounded."""
    if run.adapter.trains_base or not run.init.weights:
        return "float32"
    from argosy.checkpoint.open import open_model

    weights = open_model(run.init.weights).weights
    return "bfloat16" if {str(weights.dtype(name)) for name in weights.names} == {"bfloat16"} else "float32"


def backend() -> str:
    """The platform that jax computes on.

    Raises:
        BadInput: the requested platform does not exist here.
    """
    try:
        return jax.default_backend()
    except RuntimeError as error:
        asked = f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}" if os.environ.get("JAX_PLATFORMS") else None
        reason = (str(error).splitlines() or ["no reason given"])[0][:200]
        raise BadInput(
            f"jax has no such device: {reason}", where=asked, hint="`argosy doctor` lists the devices there are"
        ) from None
