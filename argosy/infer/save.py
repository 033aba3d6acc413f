"""An `LM` as files again."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np

from argosy.checkpoint import manifest
from argosy.checkpoint.hub import save_folder
from argosy.checkpoint.store import META, WEIGHTS, save_arrays
from argosy.checkpoint.stored import COMPANIONS, check_fit, weights_of
from argosy.core.errors import BadInput
from argosy.core.formats import Reader
from argosy.core.schema import Choice
from argosy.core.settings import dump
from argosy.infer.lm import LM
from argosy.models import FAMILIES


def save(lm: LM, folder: Path, format: Literal["hub", "argosy"], dtype: Any = None) -> None:
    """Writes a model with its tokenizer; the numbers in the type it came in, unless told.

    Raises:
        BadInput: the folder holds something already, or adapters are not merged.
    """
    came_in = lm.hub.get("dtype") or lm.hub.get("torch_dtype")
    write(folder, format, lm.config, weights_of(lm.module), dict(lm.hub), lm.companions, dtype or came_in, lm.tokenizer)


def write(
    folder: Path,
    format: str,
    config: Any,
    weights: Reader,
    hub: dict[str, Any],
    companions: Path | None,
    dtype: Any = None,
    tokenizer: Any = None,
) -> None:
    """Writes a model from its per-layer weights.

    Raises:
        BadInput: the folder is not empty, or the weights are not those of the plain model (adapters, int8).
    """
    if tokenizer is not None:  # readers of config.json take ids of their own where it names none
        ids = {f"{n}_token_id": getattr(tokenizer, n) for n in ("bos", "eos", "pad")}
        hub = {k: v for k, v in ids.items() if v is not None} | hub
    if format not in ("hub", "argosy"):
        raise BadInput(f"format `{format}`", hint="hub or argosy")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} is not empty", hint="name a new folder; nothing is ever overwritten")
    check_fit(config.build(), weights)
    if folder.exists():
        folder.rmdir()
    if format == "hub":
        save_folder(folder, config, weights, hub=hub, companions=companions, dtype=dtype)
    else:
        _save_checkpoint(folder, config, weights, hub, companions, dtype)
    if tokenizer is not None and not any(
        (folder / name).exists() for name in COMPANIONS if "token" in name or "vocab" in name
    ):
        tokenizer.save(folder)


def _save_checkpoint(
    folder: Path, config: Any, weights: Reader, hub: dict[str, Any], companions: Path | None, dtype: Any
) -> None:
    """One checkpoint without a run: weights by layer, settings, the small files; its manifest last."""
    kind = np.dtype(dtype) if dtype is not None else None
    arrays = {
        n: np.ascontiguousarray(weights.read(n).astype(kind or weights.dtype(n), copy=False)) for n in weights.names
    }
    save_arrays(folder, {WEIGHTS: arrays})
    family = Choice(FAMILIES, tag="family").name_of(config)
    meta = {"model": {"family": family} | dump(config), "decided": {"layers": "unroll"}, "hub": hub}
    (folder / META).write_text(json.dumps(meta, indent=1))
    if companions is not None and companions.is_dir():
        for name in COMPANIONS:
            if (companions / name).is_file():
                shutil.copyfile(companions / name, folder / name)
    manifest.write(folder)
