"""Reads the arrays and the metadata of one checkpoint."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from argosy.checkpoint.failures import root_of
from argosy.checkpoint.step import shards
from argosy.checkpoint.step.layout import DATA, META, WEIGHTS, Arrays
from argosy.core.errors import BadInput, Damaged


def read_meta(folder: Path) -> dict[str, Any]:
    """Reads the metadata (meta.json) of a checkpoint.

    Raises:
        BadInput: there is no checkpoint.
        Damaged: the metadata cannot be read.
    """
    return _guarded(folder, lambda: json.loads((folder / META).read_text()))


def stored_shapes(folder: Path, item: str = WEIGHTS) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of the arrays of one item by name, without reading the arrays.

    Raises:
        BadInput: there is no checkpoint.
        Damaged: the checkpoint cannot be read, or lacks the item.
    """
    return _guarded(folder, lambda: shards.array_shapes(folder, item))


def load_weights(folder: Path, shardings: Mapping[str, Any] | None = None, dtype: Any = None) -> Arrays:
    """Loads only the weights.

    Args:
        shardings: the sharding of each weight by name. By default weights are loaded onto the first device of the host.
        dtype: the type of the loaded weights. The default is the stored type.
    """
    return load_item(folder, WEIGHTS, shardings, dtype)


def load_item(folder: Path, item: str, shardings: Mapping[str, Any] | None = None, dtype: Any = None) -> Arrays:
    host = SingleDeviceSharding(_host())
    targets = {
        name: jax.ShapeDtypeStruct(a.shape, dtype or a.dtype, sharding=shardings[name] if shardings else host)
        for name, a in stored_shapes(folder, item).items()
    }
    return _guarded(folder, lambda: shards.read_arrays(folder, item, targets))


def load_data(folder: Path) -> Arrays:
    """Loads the arrays of a step's position in the data; empty if it has none."""
    return _guarded(folder, lambda: shards.read_on_host(folder, DATA)) if (folder / DATA).is_dir() else {}


def _host() -> Any:
    """Returns the CPU device of the host, because a model that was split over accelerators may not fit on one of them."""
    try:
        return jax.local_devices(backend="cpu")[0]
    # JAX_PLATFORMS does not include cpu.
    except RuntimeError:
        return jax.local_devices()[0]


def _guarded(folder: Path, read: Callable[[], Any]) -> Any:
    """Runs a function that reads from a checkpoint, and converts all errors (of JSON, of TensorStore, missing keys) to `Damaged`."""
    if not folder.is_dir():
        raise BadInput(f"no checkpoint at {folder}")
    try:
        return read()
    except Exception as failure:
        raise Damaged(f"cannot be read: {root_of(failure)}", where=str(folder)) from failure
