"""`argosy convert A --check B`: whether two models are the same, tensor by tensor, whatever they lie in.

Both are read by our per-layer names, so a Hub folder, a GGUF file and a checkpoint of either layout compare with each other.
Two tensors are in memory at a time, and differences are summed in float64 a slab at a time.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from argosy.checkpoint.save import Progress
from argosy.checkpoint.stored import Stored
from argosy.checkpoint.stream import in_order, size
from argosy.core.formats import Reader, is_apart, read_part
from argosy.core.formats.files import pieces
from argosy.jobs.convert import memory_used, opened

SLAB_VALUES = 1 << 20  # 8 MB in float64, a few of them at once


def compare(
    a: str,
    b: str,
    tolerance: float | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda new, all, kept: None,
) -> dict[str, Any]:
    """What differs. `equal` is true where nothing does.

    Args:
        tolerance: None: every byte must be the same. A number: types may differ, and values by that share of the largest
            magnitude in `b`.

    Raises:
        BadInput, Damaged: one of them is no model.
    """
    one, other = opened(a, say), opened(b, say)
    names = [name for name in one.weights.names if name in other.weights.names]
    only = [name for name in one.weights.names if name not in other.weights.names]
    only_other = [name for name in other.weights.names if name not in one.weights.names]
    settings = _settings(one, other)
    differences = list(_differences(one, other, names, tolerance, progress))
    return {
        "a": a,
        "b": b,
        "equal": not (only or only_other or settings or differences),
        "tolerance": tolerance,
        "tensors": len(names),
        "only_in_a": only,
        "only_in_b": only_other,
        "settings": settings,
        "differences": differences,
        "memory": memory_used([one, other]),
    }


def _settings(one: Stored, other: Stored) -> list[dict[str, Any]]:
    """Settings of the two that differ: equal weights at another rope base are another model."""
    a, b = (stored.config.resolved().model_dump(mode="json") for stored in (one, other))
    if type(one.config) is not type(other.config):
        return [{"name": "family", "a": type(one.config).__name__, "b": type(other.config).__name__}]
    return [{"name": k, "a": a[k], "b": b[k]} for k in a if a[k] != b[k] and k != "preset"]


def _differences(
    one: Stored, other: Stored, names: list[str], tolerance: float | None, progress: Progress
) -> Iterator[dict[str, Any]]:
    sizes = [size(one.weights.shape(name), one.weights.dtype(name)) for name in names]
    progress(0, sum(sizes), 0)
    for name, n_bytes in zip(names, sizes):
        if (found := _difference(one, other, name, tolerance)) is not None:
            yield {"name": name} | found
        progress(n_bytes, sum(sizes), 0)


def _difference(one: Stored, other: Stored, name: str, tolerance: float | None) -> dict[str, Any] | None:
    """None where the two are as equal as was asked for."""
    shapes = one.weights.shape(name), other.weights.shape(name)
    if shapes[0] != shapes[1]:
        return {"what": "shape", "a": list(shapes[0]), "b": list(shapes[1])}
    a, b = one.weights.dtype(name), other.weights.dtype(name)
    types = {"a": a.name, "b": b.name}
    if a == b and all(_same_bytes(x, y) for x, y in _pairs(one.weights, other.weights, name)):
        return None
    found = _distances(slabs for pair in _pairs(one.weights, other.weights, name) for slabs in _slabs(*pair))
    if tolerance is not None:
        return None if found["max_abs"] <= tolerance * found["largest"] else {"what": "values"} | types | found
    what = "dtype" if types["a"] != types["b"] else "values"
    return {"what": what} | types | found


def _pairs(one: Reader, other: Reader, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tensor of both; part by part where either comes so."""
    if not (is_apart(one, name) or is_apart(other, name)):
        yield one.read(name), other.read(name)
        return
    for i in range(one.shape(name)[0]):
        yield read_part(one, name, i), read_part(other, name, i)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """NaN equals itself here, and 0 is not -0."""
    raw = f"u{a.dtype.itemsize}"
    return all(np.array_equal(x.view(raw), y.view(raw)) for x, y in _slabs(a, b))


def _slabs(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    most = SLAB_VALUES
    for x, y in zip(pieces(a, most * a.dtype.itemsize), pieces(b, most * b.dtype.itemsize)):
        yield in_order(x), in_order(y)


def distances(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """How far apart two arrays of one shape are.

    Returns:
        max_abs: the largest difference of two values; relative: as a share of `largest`, the largest magnitude in `b`;
        cosine: of the angle between them, 1 where they point the same way. NaN where either holds one.
    """
    return _distances(_slabs(a, b))


def _distances(slabs: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    max_abs, largest, dot, a_square, b_square = 0.0, 0.0, 0.0, 0.0, 0.0
    for x, y in slabs:
        x, y = x.ravel().astype(np.float64), y.ravel().astype(np.float64)
        if not x.size:
            continue
        with np.errstate(invalid="ignore"):  # infinity less infinity
            max_abs = float(np.maximum(max_abs, np.abs(x - y).max()))
        largest = float(np.maximum(largest, np.abs(y).max()))
        dot, a_square, b_square = dot + float(x @ y), a_square + float(x @ x), b_square + float(y @ y)
    norms = math.sqrt(a_square) * math.sqrt(b_square)
    relative = max_abs / largest if largest else (0.0 if max_abs == 0 else math.inf)
    cosine = dot / norms if norms else float(a_square == b_square)
    return {"max_abs": max_abs, "relative": relative, "cosine": cosine, "largest": largest}
