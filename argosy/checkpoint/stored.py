"""A stored model: Hub folder, GGUF file, run directory or one checkpoint. `open_model` opens any of them; weights are read by
per-layer name ("layers.3.attn.q.w"), one tensor at a time.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from argosy.checkpoint import manifest
from argosy.checkpoint.run_directory import CHECKPOINTS, TOKENIZER
from argosy.checkpoint.step_reader import StepReader
from argosy.checkpoint.store import META, Checkpoints, read_meta
from argosy.core.addresses import local_path
from argosy.core.counts import plural
from argosy.core.errors import BadInput, Damaged, nearest
from argosy.core.formats import Arrays, Reader
from argosy.core.settings import dump
from argosy.core.settings.schema import Choice
from argosy.data.tokenizers.load import BESIDE, VOCABULARIES, matching
from argosy.models import FAMILIES
from argosy.models.language import LanguageConfig
from argosy.models.parts.stack import layer_addresses, stored_addresses, stored_as
from argosy.models.parts.weight import kept_in, put, variables
from argosy.parallel.place import on_devices

if TYPE_CHECKING:
    from argosy.checkpoint.adapted import Adapted
    from argosy.checkpoint.blocks import InBlocks

COMPANIONS = (
    *VOCABULARIES,
    *BESIDE,
    "generation_config.json",
    # Of sentence encoders: how token vectors are pooled.
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
"""Patterns of the small files that are copied with a model from folder to folder, byte for byte."""


@dataclass(frozen=True)
class Stored:
    """An opened model whose weights are not read yet. weights: by per-layer name. hub: its config.json. companions: the folder of
    its small files, or the GGUF file, which contains a tokenizer. kind: hub, gguf, argosy or peft.

    adapted: the base and the adapters of a run that trained adapters, or of a PEFT folder; `weights` are those of the base with the
    adapters merged as they are read. blocks: those of a GGUF file.
    """

    path: Path
    kind: str
    config: LanguageConfig
    weights: Reader
    companions: Path | None = None
    hub: dict[str, Any] = field(default_factory=dict)
    adapted: "Adapted | None" = None
    blocks: "InBlocks | None" = None


def open_model(path: str | Path, warn: Callable[[str], None] = lambda _: None) -> Stored:
    """Opens a model without reading weights.

    Raises:
        BadInput: there is nothing at the path, or it is not a model.
        Damaged: its files differ from what was written.
    """
    path = local_path(path)
    if "://" in path:
        from argosy.checkpoint.objects import fetch_model

        path = fetch_model(path)
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        from argosy.checkpoint.gguf import open_gguf

        return open_gguf(path)
    if (path / "config.json").is_file():
        from argosy.checkpoint.hub import open_folder

        return open_folder(path, warn)
    if (path / "adapter_config.json").is_file():
        from argosy.checkpoint.adapted import open_peft

        return open_peft(path, warn)
    if (path / META).is_file():
        manifest.verify(path)
        return _open_step(path, warn)
    if (path / CHECKPOINTS).is_dir():
        return _open_newest(path, Checkpoints(path / CHECKPOINTS, warn=warn), warn)
    if path.is_file():
        raise BadInput(
            f"{path} is a file, but not a .gguf", hint="a Hub folder, a .gguf file, a run directory or a checkpoint step"
        )
    if not path.exists():
        raise BadInput(f"no model at {path}", hint="a Hub folder, a .gguf file, a run directory or a checkpoint step")
    raise BadInput(
        f"{path} is not a model: it has no config.json, no meta.json and no checkpoints",
        hint="a Hub folder, a .gguf file, a run directory or a checkpoint step",
    )


def model_of(path: str | Path) -> dict[str, Any]:
    """The settings of a stored model, including its family, as a layer under `model`: the meaning of `model=FOLDER` and
    `init.weights=FOLDER`.

    Raises:
        BadInput, Damaged: as `open_model`.
    """
    config = open_model(path).config
    return {"family": Choice(FAMILIES, tag="family").name_of(config)} | dump(config)


def config_of(dumped: dict[str, Any]) -> LanguageConfig:
    """A model's settings from what `dump` wrote, including its family.

    Raises:
        BadInput: the family is not registered here, or it does not have these settings.
    """
    if (family := str(dumped.get("family"))) not in FAMILIES:
        what = f"a model of the family `{family}`, which is not registered"
        raise BadInput(what, hint=f"import the package that has it; {nearest(family, FAMILIES)}")
    return Choice(FAMILIES, tag="family").build(dumped)  # type: ignore[return-value]


def _open_newest(run: Path, checkpoints: Checkpoints, warn: Callable[[str], None]) -> Stored:
    """The last good checkpoint of a run. If the run removes it before it is locked, the next one is tried."""
    step = checkpoints.latest_good()
    if step is None:
        raise BadInput(f"{run} has no checkpoint yet", hint="the run has not saved; wait, or train it further")
    try:
        return _open_step(checkpoints.path(step), warn)
    except (BadInput, Damaged):
        if step in checkpoints.steps():
            raise
    return _open_newest(run, checkpoints, warn)


def _open_step(folder: Path, warn: Callable[[str], None] = lambda _: None) -> Stored:
    meta = read_meta(folder)
    try:
        config = config_of(meta["model"])
    except KeyError as missing:
        raise Damaged(f"{META} has no {missing}", where=str(folder)) from None
    # Of a converted model, or of a run's step.
    beside = [folder, folder.parent.parent / TOKENIZER]
    companions = next((folder for folder in beside if matching(folder, COMPANIONS)), None)
    if "base" in meta:
        from argosy.checkpoint.adapted import open_adapted

        adapted = open_adapted(folder, config, meta, warn)
        return Stored(folder, "argosy", config, adapted.weights, companions, meta.get("hub", {}), adapted)
    return Stored(
        folder, "argosy", config, StepReader(folder, config, stored_as(meta["decided"])), companions, meta.get("hub", {})
    )


def read_into(
    model: Any, weights: Reader, *, dtype: Any = None, place: Callable[[str], Any] | None = None, but: str | None = None
) -> None:
    """Fills a model in any layout from per-layer weights, one stored array at a time.

    Args:
        dtype: the type to keep the weights in; float32 by default.
        place: gives the sharding of a stored address.
        but: the name of a weight that is left as it is, whether or not it is stored.

    Raises:
        BadInput: weights are missing, unexpected or of the wrong shape, all listed.
    """
    for address, array in stored_arrays(model, weights, dtype=dtype, but=but):
        put(model, {address: on_devices(array, place(address) if place else None)})


def stored_arrays(
    model: Any, weights: Reader, *, dtype: Any = None, but: str | None = None, without: Collection[str] = ()
) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of a model in its layout, one stored array at a time, with their addresses. Arguments and errors are those of
    `read_into`.

    Args:
        without: addresses that are not read.
    """
    names, own = layer_addresses(model), variables(model)
    check_fit(model, weights, but)
    # In the order in which they are stored, so that a stack of layers is read once.
    order = {name: i for i, name in enumerate(weights.names)}
    own = {address: v for address, v in own.items() if address != but and address not in without}
    for address, v in sorted(own.items(), key=lambda item: order[names(item[0])[0]]):
        stacked = len(v.shape) > len(v.get_metadata()["meaning"].letters)
        target = np.dtype(kept_in(v, dtype or jnp.float32))
        if stacked:
            whole = np.empty(v.shape, target)
            for i, name in enumerate(names(address)):
                whole[i] = weights.read(name)
        else:
            whole = np.ascontiguousarray(weights.read(names(address)[0]).astype(target, copy=False))
        yield address, whole


def check_fit(model: Any, weights: Reader, but: str | None = None) -> None:
    """Checks that these are the weights of this model. but: the name of a weight that is not compared.

    Raises:
        BadInput: names every difference, the first eight in full.
    """
    own = variables(model)
    expected = {}
    for name, (address, i) in stored_addresses(model).items():
        expected[name] = tuple(own[address].shape if i is None else own[address].shape[1:])
    expected.pop(but, None)
    here = set(weights.names)
    problems = [f"missing {n}" for n in expected if n not in here]
    problems += [f"unexpected {n}" for n in weights.names if n not in expected and n != but]
    problems += [
        f"{n} is {weights.shape(n)}, not {shape}"
        for n, shape in expected.items()
        if n in here and weights.shape(n) != shape
    ]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise BadInput(
            f"{plural(len(problems), 'weight', 'does', 'do')} not fit the model: {'; '.join(problems[:8])}{more}",
            hint="do the model's settings belong to these weights?",
        )


def weights_of(model: Any) -> Arrays:
    """A model's weights by per-layer name; slices of stacked weights are taken when they are read."""
    from argosy.models.parts.stack import to_layers
    from argosy.models.parts.weight import split

    return Arrays(to_layers(model, split(model)[1]))
