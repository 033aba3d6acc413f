"""Opens a checkpoint of adapters. It holds the factors of each adapted contraction, the weights that were trained in full, and the
description of the base model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from argosy.adapt.base import FACTORS, retrained_addresses
from argosy.adapt.lora import LoRA
from argosy.adapt.settings import ADAPTERS
from argosy.adapt.surgery import find
from argosy.checkpoint.step.locks import ReadLock
from argosy.checkpoint.step.reader import read_array
from argosy.core.errors import BadInput, Damaged
from argosy.core.settings.schema import Choice
from argosy.models.parts.stack import stored_as
from argosy.models.parts.weight import put, variables
from argosy.weights.adapted import AdaptedModel, stack_adapters
from argosy.weights.model import OpenedModel
from argosy.weights.peft.sites import PeftContents
from argosy.weights.peft.writer import contents_of


def open_adapted(folder: Path, config: Any, meta: Mapping[str, Any], base: OpenedModel) -> AdaptedModel:
    """Opens the adapters of a checkpoint.

    Args:
        config: the config of the model with adapters.
        meta: the contents of meta.json.
        base: the base model.

    Raises:
        BadInput: the checkpoint no longer exists.
        Damaged: meta.json lacks a key.
    """
    try:
        settings: Any = Choice(ADAPTERS).build(meta["settings"]["adapter"])
        layers = stored_as(meta["decided"])
    except KeyError as missing:
        raise Damaged(f"meta.json has no {missing}", where=str(folder)) from None
    try:
        lock = ReadLock(folder)
    except FileNotFoundError:
        raise BadInput(f"no checkpoint at {folder}") from None

    def read() -> PeftContents:
        model = config.build(layers)
        settings.put_on(model)
        addresses = [f"{name}.{factor}" for name in find(model, ".*", LoRA) for factor in FACTORS]
        for address in {*addresses, *retrained_addresses(model)} & set(variables(model)):
            put(model, {address: read_array(folder, address)})
        return contents_of(model)

    if settings.onto != "stack":
        return AdaptedModel(settings, base, config, read, lock)
    if (under := base.adapted) is None:
        raise Damaged("the adapters were stacked on others, which are not in their base", where=str(folder))
    return AdaptedModel(settings, under.base, config, lambda: stack_adapters(under.contents, read(), config), lock)
