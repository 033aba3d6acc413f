"""A checkpoint of adapters: the factors of every contraction that has some, the weights that were trained in full beside them, and
which base model they belong to.

A base is known by where it was and by the size and SHA-256 of the files of its weights. It is opened again from there; another one
is refused, because adapters on other weights give plausible nonsense. A file whose size and time are those that were recorded counts
as the same when a model is loaded. A run that resumes hashes every file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from argosy.adapt.base import FACTORS, retrained
from argosy.adapt.lora import LoRA
from argosy.adapt.quant import QuantizedEinsum
from argosy.adapt.settings import ADAPTERS, Lora, LowRank
from argosy.adapt.surgery import find
from argosy.checkpoint import manifest
from argosy.checkpoint.hub import read_json
from argosy.checkpoint.peft import check_base, config_for, read_contents
from argosy.checkpoint.peft_merge import with_adapter
from argosy.checkpoint.peft_sites import CONFIG, FILES, Adapter, Contents, contractions
from argosy.checkpoint.peft_write import contents_of
from argosy.checkpoint.step_reader import read_array
from argosy.checkpoint.stored import COMPANIONS, Stored, open_model
from argosy.core.errors import BadInput, Damaged
from argosy.core.formats import Arrays, Over, Reader, View
from argosy.core.settings.schema import Choice
from argosy.data.tokenizers.load import matching
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Unroll, stored_as
from argosy.models.parts.weight import put, variables

MISSING = "put the base model back, or leave a link to it there"
OTHER = "adapters only fit the weights they were trained on: put those back, or train again with dir=NEW"


@dataclass(frozen=True)
class Adapted:
    """Adapters and their base.

    settings: the run's `adapter`. base: its weights are not merged. read: reads the factors and the weights that were trained in full.
    held: retention does not remove the checkpoint while this object exists.
    """

    settings: LowRank
    base: Stored
    config: Any
    read: Callable[[], Contents]
    held: Any = None

    @cached_property
    def contents(self) -> Contents:
        """The factors and the weights that were trained in full.

        Raises:
            Damaged: one is missing.
        """
        return self.read()

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The factors, by the per-layer name of their contraction."""
        return self.contents.adapters

    @property
    def whole(self) -> Mapping[str, np.ndarray]:
        """The weights that were trained in full, by per-layer name."""
        return self.contents.whole

    @property
    def weights(self) -> Reader:
        """The base's weights with the adapters merged as they are read, in the types of the base. Where the base was quantized for
        training, it is rounded as it was then, because the adapters have learned to make up for that."""
        return Over(View(self.base.weights, change=self._merged), Arrays(self.whole))

    @property
    def is_quantized(self) -> bool:
        """Whether the base was quantized for training."""
        return any(isinstance(of, QuantizedEinsum) for of in self._contractions.values())

    def over(self, base: Stored) -> "Adapted":
        """The same adapters, on the same base read in another way."""
        return replace(self, base=base)

    @cached_property
    def _contractions(self) -> dict[str, Contraction]:
        model = self.config.build(Unroll())
        self.settings.quantize(model)
        return find(model, ".*")

    def _merged(self, name: str, read: Callable[[], np.ndarray], part: int | None) -> np.ndarray:
        module, _, leaf = name.rpartition(".")
        of = self._contractions.get(module) if leaf == "w" else None
        if of is None or (module not in self.adapters and not isinstance(of, QuantizedEinsum)):
            return read()
        array = read() if part is None else read()[None]
        if isinstance(of, QuantizedEinsum):
            array = np.asarray(of.codes(array).dequantized(array.dtype))
        if module in self.adapters:
            array = with_adapter(of, self.adapters[module], array, part or 0)
        return array if part is None else array[0]


def open_adapted(
    folder: Path, config: Any, meta: Mapping[str, Any], warn: Callable[[str], None] = lambda _: None
) -> Adapted:
    """The adapters of a checkpoint.

    Raises:
        BadInput: the base is missing, or it has other weights.
        Damaged: meta.json lacks what it should hold.
    """
    try:
        settings: Any = Choice(ADAPTERS).build(meta["settings"]["adapter"])
        base, layers = meta["base"], stored_as(meta["decided"])
    except KeyError as missing:
        raise Damaged(f"meta.json has no {missing}", where=str(folder)) from None
    try:
        held = manifest.Held(folder)
    except FileNotFoundError:
        raise BadInput(f"no checkpoint at {folder}") from None
    def read() -> Contents:
        model = config.build(layers)
        settings.put_on(model)
        addresses = [f"{name}.{factor}" for name in find(model, ".*", LoRA) for factor in FACTORS]
        for address in {*addresses, *retrained(model)} & set(variables(model)):
            put(model, {address: read_array(folder, address)})
        return contents_of(model)

    stored = open_base(base, warn)
    if settings.onto != "stack":
        return Adapted(settings, stored, config, read, held)
    if (under := stored.adapted) is None:
        raise Damaged("the adapters were stacked on others, which are not in their base", where=str(folder))
    return Adapted(settings, under.base, config, lambda: stacked(under.contents, read(), config), held)


def open_peft(folder: Path, warn: Callable[[str], None] = lambda _: None) -> Stored:
    """A PEFT folder as a model: the base that it names, with its adapters merged as weights are read.

    Raises:
        BadInput: the base is not on this machine; or as `open_model` and `read_contents`.
        Unsupported: as `read_contents`.
    """
    keys = read_json(folder / CONFIG)
    name = keys.get("base_model_name_or_path")
    if not name or not Path(str(name)).exists():
        hint = f'argosy.load(MODEL, adapter="{folder}") names it; or write its folder as base_model_name_or_path'
        raise BadInput(f"the base model of these adapters, {name}, is not on this machine", where=str(folder / CONFIG), hint=hint)
    base = open_model(str(name), warn)
    config = config_for(folder, base.config)
    if base.adapted is not None:
        # They were trained on merged weights.
        what = f"the base of these adapters, {name}, has adapters itself"
        hint = f"argosy convert {name} FOLDER merges those: name that folder as the base"
        raise BadInput(what, where=str(folder / CONFIG), hint=hint)

    def read() -> Contents:
        contents = read_contents(folder, config)
        check_base(contents, base.weights)
        return contents

    adapted = Adapted(Lora(), base, config, read)
    companions = folder if matching(folder, COMPANIONS) else base.companions
    return Stored(folder, "peft", config, adapted.weights, companions, base.hub, adapted)


def stacked(under: Contents, own: Contents, config: Any) -> Contents:
    """Two adapters on one base as one: the ranks together, each with its own gain in B."""
    specs, out = contractions(config), dict(under.adapters)
    for name, one in own.adapters.items():
        if (other := out.get(name)) is None:
            out[name] = one
            continue
        b = np.concatenate([np.float32(each.gain) * each.b for each in (other, one)], len(specs[name].group))
        out[name] = Adapter(np.concatenate([other.a, one.a], -1), b, 1.0)
    return Contents(out, {**under.whole, **own.whole}, own.dropout)


def describe_base(stored: Stored, given: str) -> dict[str, Any]:
    """What a checkpoint says of its base: its path, and size, SHA-256 and time of every file of weights.

    given: the path or address as the user gave it.
    """
    # The newest checkpoint of a run changes; the step itself does not.
    path = given if "://" in given else str(stored.path.resolve())
    files = {file.name: manifest.describe(file) | {"mtime_ns": file.stat().st_mtime_ns} for file in _files(stored)}
    return {"path": path, "files": files}


def open_base(base: Mapping[str, Any], warn: Callable[[str], None] = lambda _: None, *, thorough: bool = False) -> Stored:
    """The base of a checkpoint.

    Args:
        base: what `describe_base` returned.
        thorough: hashes every file, also those of the same size and time.

    Raises:
        BadInput: it is not there, or its weights are others.
    """
    return open_same(base, warn, thorough=thorough, model="the base model under these adapters", missing=MISSING, other=OTHER)


def open_same(
    described: Mapping[str, Any],
    warn: Callable[[str], None],
    *,
    thorough: bool,
    model: str,
    missing: str,
    other: str,
) -> Stored:
    """The model that `describe_base` described. Arguments and errors are those of `open_base`.

    Args:
        model: what it is, for errors. missing, other: what to do where it is not there, and where its weights are others.
    """
    path = described["path"]
    if "://" not in path and not Path(path).exists():
        raise BadInput(f"{model} is not at {path}", hint=missing)
    stored = open_model(path, warn)
    here = {file.name: file for file in _files(stored)}
    if here.keys() != described["files"].keys():
        what = f"{path} has {', '.join(sorted(here))}, and {model} {', '.join(sorted(described['files']))}"
        raise BadInput(what, hint=other)
    for name, expected in described["files"].items():
        about = here[name].stat()
        if not thorough and (about.st_size, about.st_mtime_ns) == (expected["bytes"], expected["mtime_ns"]):
            continue
        if about.st_size != expected["bytes"] or manifest.describe(here[name])["sha256"] != expected["sha256"]:
            raise BadInput(f"{path} has other weights than {model}", where=str(here[name]), hint=other)
    return stored


def _files(stored: Stored) -> list[Path]:
    """The files of a model's weights. A checkpoint's manifest holds the hashes of the others."""
    if stored.path.is_file():
        return [stored.path]
    if stored.kind == "peft" and stored.adapted is not None:
        return [*_files(stored.adapted.base), *(stored.path / name for name in FILES)]
    return [stored.path / manifest.NAME] if stored.kind == "argosy" else sorted(stored.path.glob("*.safetensors"))
