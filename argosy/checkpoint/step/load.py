"""Reads the arrays and the metadata of one checkpoint."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
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
    described = _guarded(folder, lambda: _described(folder, item))
    if described is None:
        described = _guarded(folder, lambda: _orbax().checkpointables_metadata(folder.absolute()).metadata).get(item)
    if described is None:
        raise Damaged(f"its {item} cannot be read", where=str(folder))
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in described.items()}


def _described(folder: Path, item: str) -> dict[str, jax.ShapeDtypeStruct] | None:
    """The arrays of an item that are a folder each, without Orbax, whose import takes a second; None of one that is packed."""
    if not (folder / item).is_dir() or shards.is_packed(folder, item):
        return None
    stored = {name: json.loads((folder / item / name / "zarr.json").read_text()) for name in shards.names_of(folder, item)}
    return {name: jax.ShapeDtypeStruct(tuple(a["shape"]), np.dtype(a["data_type"])) for name, a in stored.items()}


def load_weights(folder: Path, shardings: Mapping[str, Any] | None = None, dtype: Any = None) -> Arrays:
    """Loads only the weights, onto these shardings ({name: sharding}) or onto the host's first device."""
    return load_item(folder, WEIGHTS, shardings, dtype)


def load_item(folder: Path, item: str, shardings: Mapping[str, Any] | None = None, dtype: Any = None) -> Arrays:
    here = SingleDeviceSharding(_host())
    wanted = {
        name: jax.ShapeDtypeStruct(a.shape, dtype or a.dtype, sharding=shardings[name] if shardings else here)
        for name, a in stored_shapes(folder, item).items()
    }
    if jax.process_count() > 1 or not shards.is_packed(folder, item):
        # Orbax would wait for all processes at each call, and takes longer where each array is a folder of its own.
        return _guarded(folder, lambda: shards.read(folder, item, wanted))
    return _guarded(folder, lambda: _orbax().load_checkpointables(folder.absolute(), {item: wanted})[item])


def load_data(folder: Path) -> Arrays:
    """The arrays of a step's position in the data; none where it had none."""
    if not (folder / DATA).is_dir():
        return {}
    # Positions may be of types that JAX narrows, such as int64.
    found = None if shards.is_packed(folder, DATA) else _guarded(folder, lambda: shards.read_on_host(folder, DATA))
    return {name: np.asarray(a) for name, a in load_item(folder, DATA).items()} if found is None else found


def _host() -> Any:
    """The host's own device: a model that is split over accelerators may not fit on one of them."""
    try:
        return jax.local_devices(backend="cpu")[0]
    # JAX_PLATFORMS names only others.
    except RuntimeError:
        return jax.local_devices()[0]


def _orbax() -> Any:
    """Orbax, imported late because that takes a second, with its internal warnings silenced."""
    import logging

    from orbax.checkpoint import v1

    logging.getLogger("absl").setLevel(logging.ERROR)
    return v1


def _guarded(folder: Path, read: Callable[[], Any]) -> Any:
    """Runs a reading function and turns any error of Orbax (a missing key, for example) into ours about the file."""
    if not folder.is_dir():
        raise BadInput(f"no checkpoint at {folder}")
    try:
        return read()
    except Exception as failure:
        raise Damaged(f"cannot be read: {root_of(failure)}", where=str(folder)) from failure
