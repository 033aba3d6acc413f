"""What the laws of families run over: the examples of every registered family. A new family is tested by being registered."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from argosy.jobs.seams import RUNS, examples, fullest
from argosy.jobs.seams import build as built
from argosy.jobs.seams import call as forward
from argosy.models import FAMILIES
from argosy.models.parts.weight import put, split

CASES = examples()
FULLEST = fullest()
# Five structures that differ: plain attention, window rings with caps, latent attention with experts and a module ahead,
# recurrent states beside attention, sinks with clamped experts. Laws that compile run over these by default, over all
# examples with the longer proofs: 31 examples in every law take 20 minutes.
DIFFERENT = tuple(FAMILIES[name] for name in ("llama", "gemma", "gpt_oss", "deepseek", "qwen3_next"))
STRUCTURES = [name for name in FULLEST if type(CASES[name]) in DIFFERENT]

__all__ = ["CASES", "RUNS", "STRUCTURES", "built", "each_layout", "forward", "in_float64", "marked", "tokens_of"]


def marked(names: Iterable[str]) -> list[Any]:
    """Examples as parameters of a test, slow but for one of each structure."""
    return [pytest.param(name, marks=() if name in STRUCTURES else pytest.mark.slow) for name in names]


def each_layout(turn: int, names: Iterable[str] = CASES) -> pytest.MarkDecorator:
    """Examples in both layouts. By default one of each structure in one layout, which changes from structure to structure
    and from law to law; the rest with the longer proofs."""

    def one(case: str, run: str, place: int) -> Any:
        by_default = case in STRUCTURES and (STRUCTURES.index(case) + turn + place) % 2 == 0
        return pytest.param(case, run, marks=() if by_default else pytest.mark.slow, id=f"{run}-{case}")

    return pytest.mark.parametrize(("case", "run"), [one(case, run, i) for case in names for i, run in enumerate(RUNS)])


def in_float64(config: Any, run: Any) -> Any:
    """The model of `built` with its weights and activations in float64, which has to be enabled."""
    model = built(config, run)
    put(model, {address: w.astype(jnp.float64) for address, w in split(model)[1].items()})
    model.dtype = jnp.float64
    return model


def tokens_of(config, rows: int = 2, length: int = 41) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(7).integers(3, config.vocab, (rows, length)), jnp.int32)
