"""Attaches adapters to a model."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from argosy.adapt.base import Retrained
from argosy.adapt.lora import DoRA, LoRA
from argosy.adapt.surgery import at, put_at, swap
from argosy.models.parts.weight import put, variable
from argosy.weights.peft.sites import Adapter


def put_adapter(model: Any, adapters: Mapping[str, Adapter], dropout: float = 0.0) -> list[str]:
    """Attaches adapters to the contractions of a model with unrolled layers, which is changed in place. Returns the names of the
    contractions. The factors are moved to the default device.

    Args:
        adapters: the factors, by the per-layer name of the contraction.
        dropout: the dropout that the adapters were trained with, which is saved with them.
    """
    alike: dict[tuple[int, float, bool], list[str]] = {}
    for name, adapter in adapters.items():
        alike.setdefault((adapter.a.shape[-1], adapter.gain, adapter.m is not None), []).append(name)
    done = []
    for (rank, gain, dora), names in alike.items():
        kind = DoRA if dora else LoRA
        make = lambda of, k=kind, r=rank, g=gain: k(of, r, g * r, gain=g)  # noqa: E731
        done += swap(model, "|".join(map(re.escape, names)), make)
    for name in done:
        at(model, name).dropout = dropout
    # Arrays in host memory would be copied to the device in every step.
    leaves = {
        f"{name}.{factor}": jnp.asarray(np.ascontiguousarray(array, np.float32))
        for name in done
        for factor, array in adapters[name]._asdict().items()
        if factor != "gain" and array is not None
    }
    put(model, leaves)
    return done


def mark_retrained(model: Any, whole: Iterable[str]) -> None:
    """Marks weights of a model with unrolled layers as trained in full, so that they are saved with the adapters. Changes the model in
    place."""
    for name in whole:
        v = variable(model, name)
        put_at(model, name, Retrained(v.get_value(), **{key: v.get_metadata()[key] for key in ("meaning", "draw")}))


def precompute_norms(model: Any) -> None:
    """Computes the norms of weights that DoRA divides by, once for a model that is not trained further."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, DoRA):
            module.settle()
