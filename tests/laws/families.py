"""What the laws of families run over: the examples of every registered family. A new family is tested by being registered."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy.models import FAMILIES
from argosy.models.parts.weight import put, split
from tools.seams import RUNS, build, examples, fullest
from tools.seams import call as forward

CASES = examples()
FULLEST = fullest()
# The fullest example of each of five structures that differ: plain attention, window rings with caps, sinks with clamped experts,
# latent attention with experts and a module ahead, recurrent states beside attention. A law that compiles runs over one or two
# of them by default, named beside the law, and over all examples with the longer proofs: 31 examples in every law take an hour.
SHORT = ("llama", "gemma", "gpt_oss", "deepseek", "qwen3_next")
FULL_OF = {short: next(name for name in FULLEST if type(CASES[name]) is FAMILIES[short]) for short in SHORT}
STRUCTURES = list(FULL_OF.values())

__all__ = ["CASES", "RUNS", "STRUCTURES", "each_layout", "forward", "in_float64", "noisy_model", "parameters_of", "tokens_of"]


def parameters_of(names: Iterable[str], families: Iterable[str] = SHORT) -> list[Any]:
    """Examples as parameters of a test. By default the fullest ones of these families; the rest is slow."""
    default = {FULL_OF[family] for family in families}
    return [pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in names]


def each_layout(*, scan: Iterable[str], unroll: Iterable[str], names: Iterable[str] = CASES) -> pytest.MarkDecorator:
    """Examples in both layouts. By default the fullest ones of these families in this layout; the rest is slow."""
    default = {(FULL_OF[family], "scan") for family in scan} | {(FULL_OF[family], "unroll") for family in unroll}

    def check_case(case: str, run: str) -> Any:
        return pytest.param(case, run, marks=() if (case, run) in default else pytest.mark.slow, id=f"{run}-{case}")

    return pytest.mark.parametrize(("case", "run"), [check_case(case, run) for case in names for run in RUNS])


_WEIGHTS: dict[tuple[type, str, bool, int], dict[str, np.ndarray]] = {}


def weights_of(config: Any, run: Any) -> dict[str, np.ndarray]:
    """The weights of `noisy_model`, drawn once for each layout: drawing compiles a program."""
    key = type(config), config.model_dump_json(), run.stacked, run.rounds
    if key not in _WEIGHTS:
        _WEIGHTS[key] = {address: np.asarray(w) for address, w in split(build(config, run))[1].items()}
    return _WEIGHTS[key]


def noisy_model(config: Any, run: Any, dtype: Any = np.float32) -> Any:
    """A model with noise on every weight, the same in either layout (tools/seams.py)."""
    model = config.build(run)
    put(model, {address: jax.device_put(w.astype(dtype)) for address, w in weights_of(config, run).items()})
    return model


def in_float64(config: Any, run: Any) -> Any:
    """The model of `noisy_model` with its weights and activations in float64, which has to be enabled."""
    model = noisy_model(config, run, np.float64)
    model.dtype = jnp.float64
    return model


def tokens_of(config, rows: int = 2, length: int = 41) -> jnp.ndarray:
    return jnp.asarray(np.random.default_rng(7).integers(3, config.vocab, (rows, length)), jnp.int32)
