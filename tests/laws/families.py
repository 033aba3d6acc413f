"""What the laws of families run over: the examples of every registered family. A new family is tested by being registered."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from argosy.jobs.seams import build as built
from argosy.jobs.seams import call as forward
from argosy.jobs.seams import examples, fullest

CASES = examples()
FULLEST = fullest()

__all__ = ["CASES", "built", "forward", "marked", "tokens_of"]


def marked(names: Iterable[str]) -> list[Any]:
    """Examples as parameters of a test, slow but for the fullest of each family."""
    return [pytest.param(name, marks=() if name in FULLEST else pytest.mark.slow) for name in names]


def tokens_of(config, rows: int = 2, length: int = 41) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(7).integers(3, config.vocab, (rows, length)), jnp.int32)
