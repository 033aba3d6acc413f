"""`argosy convert A --check B`: compares two models tensor by tensor, whatever their formats.

Both are read by our per-layer names, so a Hub folder, a GGUF file and a checkpoint in either layout can be compared with each
other. Two tensors are in memory at a time, and differences are summed in float64 slab by slab.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from argosy.checkpoint.save import Progress
from argosy.core.errors import BadInput
from argosy.core.formats import TensorReader, is_apart, read_part
from argosy.core.formats.files import pieces
from argosy.core.hub.download import local_model
from argosy.data.tokenizers.load import load_tokenizer
from argosy.infer.denoise.folder import CONTROLNET, UNUSED
from argosy.jobs.convert import DIFFUSERS_INDEX, memory_used, open_source
from argosy.weights.hub.config import read_json_object
from argosy.weights.model import OpenedModel
from argosy.weights.stream import in_order, tensor_bytes

# Entries of model_index.json that change no image.
INDEX_IGNORED = ("_diffusers_version", "_name_or_path", "requires_safety_checker")
# The values of missing entries of model_index.json.
INDEX_DEFAULTS = {"force_zeros_for_empty_prompt": True}
# Keys of tokenizer_config.json that determine the shape of a prompt's ids, and their values where they are missing.
TOKENIZER_KEYS = {"model_max_length": None, "padding_side": "right"}
# 8 MB in float64; a few of them exist at once.
SLAB_VALUES = 1 << 20


def compare(
    a: str,
    b: str,
    tolerance: float | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda new, all, kept_bytes: None,
) -> dict[str, Any]:
    """Compares two models, or two diffusers folders model by model, with their samplers, tokenizers and model_index.json. `equal` in
    the result is true if nothing differs.

    Args:
        tolerance: how far values may differ, as a share of the largest magnitude in `b`; types may then differ too. With None, every
            byte must be equal.

    Raises:
        BadInput, Damaged: one of the two is not a model, or only one of them is a diffusers folder.
    """
    folders = Path(local_model(a, say)), Path(local_model(b, say))
    if all((folder / DIFFUSERS_INDEX).is_file() for folder in folders):
        return {"a": a, "b": b, **_compared_parts(*folders, tolerance, say, progress)}
    first, second = open_source(a, say), open_source(b, say)
    names = [name for name in first.weights.names if name in second.weights.names]
    only = [name for name in first.weights.names if name not in second.weights.names]
    only_other = [name for name in second.weights.names if name not in first.weights.names]
    settings = _settings(first, second)
    differences = list(_differences(first, second, names, tolerance, progress))
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
        "memory": memory_used([first, second]),
    }


def _compared_parts(a: Path, b: Path, tolerance: float | None, say: Callable[[str], None], progress: Progress) -> dict[str, Any]:
    """Compares two diffusers folders. Names in the result begin with the names of the models' subfolders."""
    in_a, in_b = _parts(a), _parts(b)
    both, comparisons = [name for name in in_a if name in in_b], dict[str, dict[str, Any]]()
    if not both:
        raise BadInput(f"{a} and {b} have no part of the same name", where=f"{', '.join(in_a)}; {', '.join(in_b)}")
    for name in both:
        say(f"comparing {name} ...")
        comparisons[name] = compare(str(a / name), str(b / name), tolerance, say=say, progress=progress)
    joined: dict[str, Any] = {
        "only_in_a": [f"{name}/" for name in in_a if name not in in_b],
        "only_in_b": [f"{name}/" for name in in_b if name not in in_a],
        "settings": [*_index_settings(a, b), *_sampler_settings(a, b), *_tokenizer_settings(a, b)],
        "differences": [],
    }
    for name, comparison in comparisons.items():
        joined["only_in_a"] += [f"{name}/{tensor}" for tensor in comparison["only_in_a"]]
        joined["only_in_b"] += [f"{name}/{tensor}" for tensor in comparison["only_in_b"]]
        joined["settings"] += [s | {"name": f"{name}/{s['name']}"} for s in comparison["settings"]]
        joined["differences"] += [d | {"name": f"{name}/{d['name']}"} for d in comparison["differences"]]
    return {
        "equal": not any(joined.values()),
        "tolerance": tolerance,
        "tensors": sum(comparison["tensors"] for comparison in comparisons.values()),
        **joined,
        "memory": max((comparison["memory"] for comparison in comparisons.values()), key=lambda memory: memory["bound_bytes"]),
    }


def _parts(folder: Path) -> list[str]:
    """Returns the subfolders of the models that a pipeline of diffusers draws with.

    Raises:
        BadInput: the folder has no models.
    """
    listed = _listed(folder)
    names = sorted(path.parent.name for path in folder.glob("*/config.json"))
    # model_index.json names one of several ControlNets.
    names = [name for name in names if (CONTROLNET if name.startswith(f"{CONTROLNET}_") else name) in listed]
    if not names:
        raise BadInput(f"{folder} has a {DIFFUSERS_INDEX}, and no folder with a model")
    return names


def _listed(folder: Path) -> list[str]:
    """Returns the subfolders that model_index.json of a diffusers folder names, without those that are not used to draw images."""
    index = read_json_object(folder / DIFFUSERS_INDEX)
    return [name for name, library in index.items() if isinstance(library, list) and library[:1] != [None] and name not in UNUSED]


def _index_settings(a: Path, b: Path) -> list[dict[str, Any]]:
    """The entries in which the model_index.json of two diffusers folders differ, without versions and places. Classes of tokenizers
    do not count, since their vocabularies are compared."""
    first, second = (INDEX_DEFAULTS | read_json_object(folder / DIFFUSERS_INDEX) for folder in (a, b))
    names = [name for name in dict.fromkeys([*first, *second]) if first.get(name) != second.get(name)]
    names = [name for name in names if name not in (*UNUSED, *INDEX_IGNORED) and not name.startswith("tokenizer")]
    return [{"name": f"{DIFFUSERS_INDEX}/{name}", "a": first.get(name), "b": second.get(name)} for name in names]


def _tokenizer_settings(a: Path, b: Path) -> list[dict[str, Any]]:
    """Returns the settings in which the tokenizers of two diffusers folders differ, as far as they affect the ids of a prompt."""
    names = [name for name in dict.fromkeys([*_listed(a), *_listed(b)]) if name.startswith("tokenizer")]
    differences = list[dict[str, Any]]()
    for name in names:
        first, second = (_tokenizer(folder / name) for folder in (a, b))
        keys = [key for key in dict.fromkeys([*first, *second]) if first.get(key) != second.get(key)]
        differences += [{"name": f"{name}/{key}", "a": first.get(key), "b": second.get(key)} for key in keys]
    return differences


def _tokenizer(folder: Path) -> dict[str, Any]:
    """Returns the settings of a tokenizer that affect the ids of a prompt: the hash of the vocabulary, special tokens, the length, the
    side of padding, chat templates. Empty without the folder."""
    if not folder.is_dir():
        return {}
    tokenizer = load_tokenizer(folder)
    raw = tokenizer.config.raw
    shape = {key: raw.get(key, default) for key, default in TOKENIZER_KEYS.items()}
    described = {"sha256": tokenizer.fingerprint, **tokenizer.special, **shape}
    return described | {f"chat_template ({name})": template for name, template in tokenizer.chat_templates.items()}


def _sampler_settings(a: Path, b: Path) -> list[dict[str, Any]]:
    """Returns the settings in which the samplers of two diffusers folders differ."""
    first, second = (_sampler(folder / "scheduler" / "scheduler_config.json") for folder in (a, b))
    names = [name for name in dict.fromkeys([*first, *second]) if name != "_diffusers_version" and first.get(name) != second.get(name)]
    return [{"name": f"scheduler/{name}", "a": first.get(name), "b": second.get(name)} for name in names]


def _sampler(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _settings(first: OpenedModel, second: OpenedModel) -> list[dict[str, Any]]:
    """Returns the settings in which two models differ, because equal weights with another rope base are another model."""
    a, b = (stored.config.resolved().model_dump(mode="json") for stored in (first, second))
    if type(first.config) is not type(second.config):
        return [{"name": "family", "a": type(first.config).__name__, "b": type(second.config).__name__}]
    return [{"name": k, "a": a[k], "b": b[k]} for k in a if a[k] != b[k] and k != "preset"]


def _differences(
    first: OpenedModel, second: OpenedModel, names: list[str], tolerance: float | None, progress: Progress
) -> Iterator[dict[str, Any]]:
    sizes = [tensor_bytes(first.weights.shape(name), first.weights.dtype(name)) for name in names]
    progress(0, sum(sizes), 0)
    for name, n_bytes in zip(names, sizes):
        if (difference := _difference(first, second, name, tolerance)) is not None:
            yield {"name": name} | difference
        progress(n_bytes, sum(sizes), 0)


def _difference(first: OpenedModel, second: OpenedModel, name: str, tolerance: float | None) -> dict[str, Any] | None:
    """Returns the difference of a tensor between two models; None if they are equal within the tolerance."""
    shapes = first.weights.shape(name), second.weights.shape(name)
    if shapes[0] != shapes[1]:
        return {"what": "shape", "a": list(shapes[0]), "b": list(shapes[1])}
    a, b = first.weights.dtype(name), second.weights.dtype(name)
    types = {"a": a.name, "b": b.name}
    if a == b and all(_same_bytes(x, y) for x, y in _pairs(first.weights, second.weights, name)):
        return None
    distances = _distances(slabs for pair in _pairs(first.weights, second.weights, name) for slabs in _slabs(*pair))
    if tolerance is not None:
        return None if distances["max_abs"] <= tolerance * distances["largest"] else {"what": "values"} | types | distances
    kind = "dtype" if types["a"] != types["b"] else "values"
    return {"what": kind} | types | distances


def _pairs(first: TensorReader, second: TensorReader, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a tensor of both models, entry by entry along the first axis if one of them is stored in parts."""
    if not (is_apart(first, name) or is_apart(second, name)):
        yield first.read(name), second.read(name)
        return
    for i in range(first.shape(name)[0]):
        yield read_part(first, name, i), read_part(second, name, i)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether the bytes of two arrays are equal. So NaN equals itself, and 0 differs from -0."""
    raw = f"u{a.dtype.itemsize}"
    return all(np.array_equal(x.view(raw), y.view(raw)) for x, y in _slabs(a, b))


def _slabs(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    most = SLAB_VALUES
    for x, y in zip(pieces(a, most * a.dtype.itemsize), pieces(b, most * b.dtype.itemsize)):
        yield in_order(x), in_order(y)


def distances(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Computes how far apart two arrays of the same shape are.

    Returns:
        `max_abs`, the largest difference of two values; `largest`, the largest magnitude in `b`; `relative`, max_abs / largest; and
            `cosine`, the cosine of the angle between the arrays. They are NaN if one of the arrays contains NaN.
    """
    return _distances(_slabs(a, b))


def _distances(slabs: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    max_abs, largest, dot, a_square, b_square = 0.0, 0.0, 0.0, 0.0, 0.0
    for x, y in slabs:
        x, y = x.ravel().astype(np.float64), y.ravel().astype(np.float64)
        if not x.size:
            continue
        # Infinity minus infinity.
        with np.errstate(invalid="ignore"):
            max_abs = float(np.maximum(max_abs, np.abs(x - y).max()))
        largest = float(np.maximum(largest, np.abs(y).max()))
        dot, a_square, b_square = dot + float(x @ y), a_square + float(x @ x), b_square + float(y @ y)
    norms = math.sqrt(a_square) * math.sqrt(b_square)
    relative = max_abs / largest if largest else (0.0 if max_abs == 0 else math.inf)
    cosine = dot / norms if norms else float(a_square == b_square)
    return {"max_abs": max_abs, "relative": relative, "cosine": cosine, "largest": largest}
