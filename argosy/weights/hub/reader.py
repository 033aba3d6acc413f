"""Reads Hub folders: config.json, safetensors, and the small files beside them.

Files are memory-mapped, and axes are permuted as views. So a folder of any size opens at once, and each tensor is read when it is
needed. Pickles are never read, and code that `auto_map` in a config names is never imported.
"""

from collections.abc import Callable, Collection, KeysView, Mapping, Sequence
from copy import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.formats import TensorReader, TensorView
from argosy.core.formats.safetensors import SafetensorsFolder
from argosy.core.keymap import IGNORED, KeyMap, KeyRow, Rearrangement
from argosy.models.base.language import LanguageConfig
from argosy.weights.hub.config import config_from, is_packed, read_json_object
from argosy.weights.hub.quantized.model import quantized_weights
from argosy.weights.hub.quantized.module import PackedModule
from argosy.weights.hub.quantized.reader import PackedTensors
from argosy.weights.hub.quantized.settings import packed_modules
from argosy.weights.model import OpenedModel
from argosy.weights.quantized import QuantizedWeights


def with_expected_names(
    reader: TensorReader, prefixes: Sequence[str], old: Mapping[str, str], expected: Collection[str]
) -> TensorReader:
    """Returns a reader of the tensors under the names that the model expects. Stored names may differ by a prefix, because a model that
    is saved with its head has other prefixes than without, or by an old suffix. Where both names exist, the expected one is used.

    Args:
        prefixes: the prefixes that stored names may have too much or lack.
        old: old suffix -> the suffix that is expected.
        expected: the names that the model expects.
    """
    name_of = {name: name for name in reader.names}
    for name in set(reader.names) - set(expected):
        newer = next((name.removesuffix(end) + new for end, new in old.items() if name.endswith(end)), name)
        others = [newer, *(other for prefix in prefixes for other in (prefix + newer, newer.removeprefix(prefix)))]
        if (other := next((other for other in others if other in expected), name)) not in name_of:
            name_of[other] = name_of.pop(name)
    return TensorView(reader, names=name_of)


def is_headless(hub: Mapping[str, Any], config: Any, names: Collection[str]) -> bool:
    """Whether a folder holds a language model without its head, as some sentence encoders are published (E5-Mistral).

    Args:
        hub: the contents of config.json.
        config: the settings of the model.
        names: the names of the folder's tensors.
    """
    kinds, untied = hub.get("architectures") or [], getattr(config, "causal", False) and not config.tied and not config.scored
    return untied and all(str(kind).endswith("Model") for kind in kinds) and bool(kinds) and "lm_head.weight" not in names


class MappedTensors:
    """A reader of another format's tensors under our per-layer names, which a `KeyMap` defines."""

    def __init__(self, table: KeyMap, reader: TensorReader, where: str):
        self.table, self.reader = table, reader
        try:
            shapes = table.plan({name: reader.shape(name) for name in reader.names})
        except BadInput as error:
            raise BadInput(error.what, where=f"{where}: {error.where}", hint=error.hint) from None
        self._theirs = {path: name for name, ours in table.ours_of(reader.names).items() for path in ours}
        # In the order of the files, so that they are read sequentially.
        self._shapes = {path: shapes[path] for path in self._theirs if path in shapes}

    def with_reader(self, reader: TensorReader) -> "MappedTensors":
        """Returns the same table of names over another reader."""
        other = copy(self)
        other.reader = reader
        return other

    @property
    def names(self) -> KeysView[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if self.table.is_scaled(name) else self.reader.dtype(self._theirs[name])

    def read(self, name: str) -> np.ndarray:
        return self.table.read(self.reader, name)

    def source(self, name: str) -> str:
        """Returns the stored name of a tensor that this weight is made from. There may be further ones."""
        return self._theirs[name]

    def is_apart(self, name: str) -> bool:
        return self.table.is_apart(name)

    def read_part(self, name: str, i: int) -> np.ndarray:
        return self.table.read_part(self.reader, name, i) if self.is_apart(name) else self.read(name)[i]

    @property
    def scaled(self) -> list[str]:
        """The names of weights that are computed from stored values and scales."""
        return [name for name in self.names if self.table.is_scaled(name)]


def open_folder(folder: Path, warn: Callable[[str], None] = lambda _: None) -> OpenedModel:
    """Opens a Hub folder.

    Args:
        warn: called with a sentence about tensors that the model does not use.

    Raises:
        BadInput: the architecture is not implemented, or tensors are missing, unexpected or of the wrong shape. All are listed.
        Damaged: a file contradicts itself.
    """
    hub = read_json_object(folder / "config.json")
    config = config_from(hub, str(folder / "config.json"))
    tensors: TensorReader = SafetensorsFolder.open(folder)
    packed = None
    if is_packed(hub):
        modules = packed_modules(hub["quantization_config"], tensors, str(folder))
        tensors = packed = PackedTensors(tensors, modules)
    if config.hub_prefixes or config.hub_old_ends:
        tensors = with_expected_names(tensors, config.hub_prefixes, config.hub_old_ends, KeyMap(*config.hub_rows()).names)
    declared, config = config, config.fitted(tensors.names)
    if is_headless(hub, config, tensors.names):
        config = config.model_copy(update={"tied": True})
    for key in type(config).model_fields:
        stated, actual = getattr(declared, key), getattr(config, key)
        if stated != actual and key not in config.hub_unsaid:
            warn(f"{folder}: config.json has {key} = {stated}, but the tensors have {key} = {actual}, which is used")
    left_out = [n for n in tensors.names if any(fnmatchcase(n, pattern) for pattern in config.hub_left_out)]
    if left_out:
        many = plural(len(left_out), "tensor", "is", "are")
        warn(f"{folder}: {many} ignored because the model does not use them: {_patterns(left_out)}")
    hub = type(config).hub_text(hub)
    rows, sizes = config.hub_rows()
    if hub.get("quantization_config") and packed is None:
        rows = config.hub_scaled(rows, tensors.names)
    table = KeyMap(rows, sizes, ignore=(*IGNORED, *config.hub_ignore, *config.hub_left_out))
    check_vocabulary(rows, sizes, tensors, str(folder))
    weights = MappedTensors(table, tensors, str(folder))
    quantized = None if packed is None else _quantized_weights(config, weights, packed, warn)

    def published() -> QuantizedWeights | None:
        """The codes of weights that `weights` gives as floats. Conversions and training need none, and to find their blocks takes
        the memory of a weight."""
        if not any(row.scales for row in rows):
            return None
        codes = PackedTensors(tensors, packed_modules(hub["quantization_config"], tensors, str(folder)))
        plain = KeyMap(list(map(_unscaled, rows)), sizes, ignore=table.ignore)
        return _quantized_weights(config, MappedTensors(plain, codes, str(folder)), codes, warn)

    return OpenedModel(folder, "hub", config, weights, folder, hub, quantized=quantized, published=published)


def _unscaled(row: KeyRow) -> KeyRow:
    """Returns the row of a weight with scales for a reader that has already multiplied the scales into the weight."""
    return replace(row, names=row.names[0].removesuffix("_blocks"), scales=None) if row.scales else row


def _quantized_weights(
    config: LanguageConfig, weights: MappedTensors, packed: PackedTensors, warn: Callable[[str], None]
) -> QuantizedWeights | None:
    """Returns the weights of a packed folder with the codes of quantized ones."""
    names = {n: weights.reader.source(n) if isinstance(weights.reader, TensorView) else n for n in weights.reader.names}
    sources: dict[str, list[PackedModule | None]] = {}
    for name, paths in weights.table.ours_of(n for n in weights.table.names if n in names).items():
        for path in paths:
            sources.setdefault(path, []).append(packed.modules.get(names[name]))
    return quantized_weights(
        config, lambda part: weights.with_reader(TensorView(packed.with_part(part), names=names)), sources, packed.tensors, warn
    )


def _patterns(names: list[str]) -> str:
    return ", ".join(sorted({name.split(".")[0] + ".*" for name in names}))


def check_vocabulary(rows: list[KeyRow], sizes: Mapping[str, int], tensors: TensorReader, where: str) -> None:
    """Checks that `vocab_size` in config.json equals the number of rows of the embedding. The two often differ after a vocabulary was
    padded or extended. transformers refuses such folders too, because the softmax would be different.

    Args:
        rows, sizes: the family's Hub table and the sizes of its letters.

    Raises:
        BadInput: the numbers differ. The message gives both, and the hint says what to write.
    """
    for row in rows:
        if row.paths != "embed.w" or not isinstance(row.names, str) or row.names not in tensors.names:
            continue
        axes, shape = Rearrangement.parse(row.reading).left[0].axes, tensors.shape(row.names)
        if ("V",) not in axes or len(shape) != len(axes):
            continue
        count = shape[axes.index(("V",))]
        if count != sizes["V"]:
            raise BadInput(
                f"config.json says `vocab_size` is {sizes['V']}, and `{row.names}` has {plural(count, 'row')}",
                where=f"in {where}",
                hint=f'if the vocabulary was padded or extended, write "vocab_size": {count} into config.json',
            )


def check_tied_head(stored: OpenedModel) -> None:
    """Checks that a stored head equals the embedding if the config ties them. Otherwise a difference would be found only when the head
    is read.

    Raises:
        BadInput: the head and the embedding differ.
    """
    if stored.kind != "hub" or not isinstance(stored.weights, MappedTensors):
        return
    for row in stored.config.hub_rows()[0]:
        if {row.tied_to, *row.copies} & set(stored.weights.reader.names) and isinstance(row.paths, str):
            stored.weights.read(row.paths)
