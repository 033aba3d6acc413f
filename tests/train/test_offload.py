"""The optimizer's state in the host's memory: the same numbers, and less memory of a device."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import default, described_tpus, numbers

from argosy.core.errors import BadInput, Unsupported
from argosy.jobs.assemble import Decided, assemble
from argosy.jobs.compose import compose
from argosy.jobs.devices import config_of, lowered_step
from argosy.jobs.run import Run
from argosy.jobs.train import train
from argosy.models.parts.stack import Scan
from argosy.parallel.mesh import MeshSettings
from argosy.train.offload import HOST, hosted
from argosy.train.optim import AdamW

WORDS = ["model.width=32", "model.ffn=96", "model.vocab=64", "model.layers=2", "model.heads=2", "data.source=synthetic", "data.batch=8"]
WORDS += ["data.sequence=32", "eval.batches=0", "steps=3", "schedule=constant", "log.every=1", "execution.run=scan"]
ONE, FOUR = ["mesh.fsdp=1"], ["mesh.fsdp=2", "mesh.tensor=2"]


def run_of(*words: str) -> Run:
    return compose(Run, "tiny", [*WORDS, *words]).value


def after(folder: Path, *words: str) -> tuple[dict[int, float], dict[str, np.ndarray]]:
    """Losses and weights of a run."""
    result = train("tiny", [*WORDS, f"dir={folder}", *words], Quiet())
    return numbers(folder, "loss"), {a: np.asarray(w) for a, w in result.state.params.items()}
