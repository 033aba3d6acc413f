"""What the laws of families run over: the examples of every registered family. A new family is tested by being registered."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from argosy.jobs.seams import RUNS, examples, fullest
from argosy.jobs.seams import build as built
from argosy.jobs.seams import call as forward

CASES = examples()
FULLEST = fullest()

__all__ = ["CASES", "RUNS", "built", "each_layout", "forward", "marked", "tokens_of"]


def marked(names: Iterable[str]) -> list[Any]:
    """Examples as parameters of a test, slow but for the fullest of each family."""
    return [pytest.param(name, marks=() if name in FULLEST else pytest.mark.slow) for name in names]


def each_layout(turn: int, names: Iterable[str] = CASES) -> pytest.MarkDecorator:
    """Examples in both layouts. By default the fullest of each family in one of them, which changes from family to family
    and from law to law; the rest with the longer proofs."""

    def one(case: str, run: str, place: int) -> Any:
        by_default = case in FULLEST and (list(FULLEST).index(case) + turn + place) % 2 == 0
        return pytest.param(case, run, marks=() if by_default else pytest.mark.slow, id=f"{run}-{case}")

    return pytest.mark.parametrize(("case", "run"), [one(case, run, i) for case in names for i, run in enumerate(RUNS)])


def tokens_of(config, rows: int = 2, length: int = 41) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(7).integers(3, config.vocab, (rows, length)), jnp.int32)
