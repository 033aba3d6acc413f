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
    """Reads the metadata saved with the arrays.

    Raises:
        BadInput: there is no checkpoint.
        Damaged: it cannot be read.
    """
    return _guarded(folder, lambda: json.loads((folder / META).read_text()))


def stored_shapes(folder: Path, item: str = WEIGHTS) -> dict[str, jax.ShapeDtypeStruct]:
    """Names, shapes and types of the arrays of one item, without reading them.

    Raises:
        BadInput: there is no checkpoint.
        Damaged: it cannot be read, or holds no such item.
    """
    return _guarded(folder, lambda: shards.array_shapes(folder, item))


def load_weights(folder: Path, shardings: Mapping[str, Any] | None = None, dtype: Any = None) -> Arrays:
    """Loads only the weights, onto these shardings ({name: sharding}) or onto the host's first device."""
    return load_item(folder, WEIGHTS, shardings, dtype)


def load_item(folder: Path, item: str, shardings: Mapping[str, Any] | None = None, dtype: Any = None) -> Arrays:
    host = SingleDeviceSharding(_host())
    targets = {
        name: jax.ShapeDtypeStruct(a.shape, dtype or a.dtype, sharding=shardings[name] if shardings else host)
        for name, a in stored_shapes(folder, item).items()
    }
    return _guarded(folder, lambda: shards.read_arrays(folder, item, targets))


def load_data(folder: Path) -> Arrays:
    """The arrays of a step's position in the data; none where it had none."""
    return _guarded(folder, lambda: shards.read_on_host(folder, DATA)) if (folder / DATA).is_dir() else {}


def _host() -> Any:
    """The host's own device: a model that is split over accelerators may not fit on one of them."""
    try:
        return jax.local_devices(backend="cpu")[0]
    # JAX_PLATFORMS names only others.
    except RuntimeError:
        return jax.local_devices()[0]


def _guarded(folder: Path, read: Callable[[], Any]) -> Any:
    """Runs a reading function and turns any error (of JSON, a missing key, of TensorStore) into one about the checkpoint."""
    if not folder.is_dir():
        raise BadInput(f"no checkpoint at {folder}")
    try:
        return read()
    except Exception as failure:
        raise Damaged(f"cannot be read: {root_of(failure)}", where=str(folder)) from failure
