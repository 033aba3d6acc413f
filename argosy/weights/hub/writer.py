"""Writes Hub folders: config.json, safetensors, and the small files beside them."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.formats import TensorReader, TensorView
from argosy.core.formats.files import File, of_bytes, of_text, write_file
from argosy.core.formats.safetensors import DIFFUSION, MODEL, folder_files
from argosy.core.keymap import KeyMap
from argosy.data.tokenizers.load import matching
from argosy.models.base.config import SCORING
from argosy.models.base.language import LanguageConfig
from argosy.models.parts.weight import float32_addresses
from argosy.weights.hub.config import config_from, is_diffusers, without_quantization
from argosy.weights.model import COMPANIONS


def hub_files(
    config: LanguageConfig,
    weights: TensorReader,
    *,
    hub: dict[str, Any] | None = None,
    dtype: Any = None,
    shard_bytes: float = 5e9,
) -> list[File]:
    """Returns the files of a Hub folder for a model, including config.json.

    Args:
        weights: the weights, by per-layer name.
        hub: the config.json that the model was loaded with. Keys that do not describe the architecture (such as token ids) are kept.
        dtype: the type of the tensors, as in `cast_weights`.
        shard_bytes: the most bytes of one safetensors file.

    Raises:
        BadInput: weights are missing, unexpected or of the wrong shape. All are listed.
        Unsupported: safetensors has no name for the type.
    """
    entries = list(KeyMap(*config.hub_rows()).inverse(cast_weights(config, weights, dtype)))
    kind = Counter(str(entry.dtype) for entry in entries).most_common(1)[0][0]
    stem = DIFFUSION if is_diffusers(config.to_hub()) else MODEL
    return [*folder_files(entries, shard_bytes, stem=stem), hub_config_file(config, hub, kind)]


def hub_config_file(config: LanguageConfig, hub: dict[str, Any] | None, kind: str, **more: Any) -> File:
    """Returns the config.json of a Hub folder.

    Args:
        hub: the config.json that the model was loaded with, as in `hub_files`.
        kind: the type of most tensors, such as bfloat16.
        more: further keys.
    """
    keys = config.to_hub()
    if is_diffusers(keys):
        contents = without_quantization(hub) | keys | more
        del contents["model_type"]
    else:
        contents = without_quantization(hub) | _kept_type(hub, keys) | {"dtype": kind, "torch_dtype": kind} | more
    return of_text("config.json", json.dumps(contents, indent=2) + "\n")


def save_folder(
    folder: str | Path,
    config: LanguageConfig,
    weights: TensorReader,
    *,
    hub: dict[str, Any] | None = None,
    companions: Path | None = None,
    dtype: Any = None,
    shard_bytes: float = 5e9,
) -> None:
    """Writes a Hub folder in place, with one slab of a tensor in memory at a time. Other arguments and errors are those of `hub_files`.

    Args:
        companions: the folder whose small files (tokenizer, configs) are copied.
    """
    for file in [*hub_files(config, weights, hub=hub, dtype=dtype, shard_bytes=shard_bytes), *companion_files(companions)]:
        write_file(Path(folder) / file.name, file)


def companion_files(companions: Path | None) -> list[File]:
    """Returns the small files (tokenizer, configs) of a model's folder, each under its path relative to the folder."""
    if companions is None or not companions.is_dir():
        return []
    files = matching(companions, COMPANIONS)
    return [of_bytes(file.relative_to(companions).as_posix(), file.read_bytes()) for file in files]


def cast_weights(config: LanguageConfig, weights: TensorReader, dtype: Any) -> TensorReader:
    """Returns a reader that converts per-layer weights to another type. Weights whose rounding would change discrete choices keep their
    type (`weight.exact`).

    Args:
        dtype: one type for all weights, or {name: type}. None keeps the stored types, and so do names that the mapping lacks.
    """
    if dtype is None:
        return weights
    kinds = dtype if isinstance(dtype, Mapping) else dict.fromkeys(weights.names, dtype)
    dtypes = {name: np.dtype(kinds[name]) for name in set(kinds) - float32_addresses(config.build())}
    return TensorView(weights, dtypes=dtypes)


def _kept_type(hub: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json keys `new`, with the `model_type` and `architectures` of the original folder if these are read to the
    same settings."""
    if (
        hub
        and hub.get("architectures")
        and str(hub["architectures"][0]).endswith(SCORING) == str(new["architectures"][0]).endswith(SCORING)
        and config_from(hub | new | {"model_type": hub["model_type"]}, "").to_hub() == new
    ):
        return new | {k: hub[k] for k in ("model_type", "architectures")}
    return new
