"""What the laws of families run over: the examples of every registered family. A new family is tested by being registered."""

import jax.numpy as jnp
import numpy as np

from argosy.jobs.seams import build as built
from argosy.jobs.seams import call as forward
from argosy.jobs.seams import examples

CASES = examples()

__all__ = ["CASES", "built", "forward", "tokens_of"]


def tokens_of(config, rows: int = 2, length: int = 41) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(7).integers(3, config.vocab, (rows, length)), jnp.int32)
