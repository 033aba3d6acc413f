"""Finds out, from files and without jax, whether a model draws or reads images, and parses image sizes."""

import json
from pathlib import Path
from typing import Any

from argosy.core.errors import BadInput
from argosy.core.hub.download import local_model
from argosy.core.progress import Say
from argosy.core.settings import yaml_layer
from argosy.models import FAMILIES


def parsed_size(text: str | int | None) -> tuple[int, int] | None:
    """Parses "WIDTHxHEIGHT", or one number for both. Returns (height, width); None for None.

    Raises:
        BadInput: the text is something else.
    """
    if text is None:
        return None
    width, _, height = str(text).lower().partition("x")
    height = height or width
    if not (width.isdecimal() and height.isdecimal()):
        raise BadInput(f"size={text}", hint="pixels as WIDTHxHEIGHT, such as size=768x512, or one number for both")
    return int(height), int(width)


def draws_images(model: str | Path, say: Say = lambda _: None) -> bool:
    """Whether a MODEL argument is a diffusers folder, or a run or a checkpoint of a denoiser."""
    folder = Path(local_model(model, say))
    if (folder / "model_index.json").is_file():
        return True
    family = _family(folder)
    return family in FAMILIES and FAMILIES[family].inputs == "images"


def embeds_images(model: str | Path, say: Say = lambda _: None) -> bool:
    """Whether a MODEL argument is a CLIP with both towers: a Hub folder or a checkpoint."""
    folder = Path(local_model(model, say))
    family = _family(folder)
    if family is None and (folder / "config.json").is_file():
        return _json(folder / "config.json").get("model_type") in FAMILIES["clip"].hub_types
    return family is not None and family in FAMILIES and FAMILIES[family].inputs == "image_texts"


def check_one_tower(model: str | Path, verb: str, say: Say = lambda _: None) -> None:
    """Checks that a MODEL argument is no CLIP with both towers, for a verb that has no use for one.

    Raises:
        BadInput: the model is one.
    """
    if embeds_images(model, say):
        hint = "argosy eval MODEL tasks=images clip=FOLDER scores drawn images; in Python, argosy.load(FOLDER).embed_images(images)"
        raise BadInput(f"argosy {verb} of CLIP with both towers is not built", where=str(model), hint=hint)


def _family(folder: Path) -> Any:
    """The family of a run's or a checkpoint's model; None for anything else."""
    if not folder.is_dir():
        return None
    # A checkpoint lies in its run's folder of checkpoints.
    for parent in [folder, *([folder.absolute().parents[1]] if folder.absolute().parent.name == "checkpoints" else [])]:
        if (settings := parent / "settings.yml").is_file():
            return (yaml_layer(settings).values.get("model") or {}).get("family")
    meta = folder / "meta.json"
    model = _json(meta).get("model") if meta.is_file() else None
    return model.get("family") if isinstance(model, dict) else None


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where it is damaged, which whoever opens the model says."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
