"""Reads and writes Hub folders: config.json, safetensors, and the small files beside them.

Reading maps files and permutes views: a folder of any size opens at once, and each tensor is read when it is needed. Pickles are
never read, and `auto_map` in a config imports nothing.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, KeysView, Mapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from argosy.checkpoint.stored import COMPANIONS, Stored
from argosy.core.counts import plural
from argosy.core.errors import BadInput, Damaged, complaint, nearest
from argosy.core.formats import Reader, View
from argosy.core.formats.files import File, of_bytes, of_text, write_file
from argosy.core.formats.quants import FP8_BLOCK
from argosy.core.formats.safetensors import Folder, folder_files
from argosy.core.keymap import IGNORED, How, KeyMap, Row
from argosy.data.tokenizers.load import matching
from argosy.models import FAMILIES
from argosy.models.config import SCORING, with_scores
from argosy.models.language import LanguageConfig
from argosy.models.parts.weight import exact

CONFIG_BYTES = 16 << 20
# The deepest published model has 126.
MOST_LAYERS = 10_000
# Over all layers; Kimi K2 has 23,040.
MOST_EXPERTS = 1_000_000
# Of nested JSON values; published configs have 4.
MOST_DEPTH = 32


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of limited size.

    Raises:
        Damaged: the file is not a JSON object.
    """
    if path.stat().st_size > CONFIG_BYTES:
        raise Damaged(f"{path.name} has {plural(path.stat().st_size, 'byte')}", where=str(path))
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} is not JSON: {str(error)[:120]}", where=str(path)) from None
    if not isinstance(value, dict):
        raise Damaged(f"{path.name} is not an object", where=str(path))
    return value


def config_from(hub: dict[str, Any], where: str) -> LanguageConfig:
    """The settings that a config.json describes.

    Raises:
        BadInput: the architecture is not built, or a key would change the results and is not supported.
    """
    check_bounds(hub, where)
    kind = hub.get("model_type")
    families = by_hub_type()
    if not isinstance(kind, str) or kind not in families:
        near = nearest(str(kind), families) or ""
        hint = f"{near}{'' if near.endswith('?') else '.'} A new family is one file and one line: docs/new-family.md"
        raise BadInput(f"architecture `{kind}` is not built", where=where, hint=hint)
    check_quantised(hub, where)
    try:
        text = families[kind].hub_text(_plain(hub))
        check_bounds(text, where)
        config = with_scores(families[kind].from_hub(text), hub)
    except BadInput as error:
        raise BadInput(error.what, where=error.where or where, hint=error.hint) from None
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise BadInput(f"config.json does not describe a model: {complaint(error)}", where=where) from None
    if config.experts and config.layers * config.experts.count > MOST_EXPERTS:
        many = f"{config.experts.count:.4g} experts in each of {config.layers} layers"
        raise BadInput(f"config.json: {many}: at most {MOST_EXPERTS:,} in all are supported", where=where)
    return config


def by_hub_type() -> dict[str, type[LanguageConfig]]:
    """The family that reads each `model_type`.

    Raises:
        ValueError: two families claim one.
    """
    out: dict[str, type[LanguageConfig]] = {}
    for name in FAMILIES:
        for kind in FAMILIES[name].hub_types:
            if kind in out:
                raise ValueError(f"{FAMILIES[name].__name__} and {out[kind].__name__} both read `{kind}`")
            out[kind] = FAMILIES[name]
    return out


def check_quantised(hub: dict[str, Any], where: str) -> None:
    """Checks that weights are plain, or in blocks with scales as DeepSeek-V3 and gpt-oss are published.

    Raises:
        BadInput: they are quantized in another way.
    """
    quantization = hub.get("quantization_config")
    if not quantization:
        return
    method = str(quantization.get("quant_method", "?"))[:40]
    blocks = quantization.get("weight_block_size")
    if method == "mxfp4" or (method == "fp8" and blocks == [FP8_BLOCK, FP8_BLOCK]):
        return
    how = f"`{method}`" + (f" in blocks of {str(blocks)[:40]}" if method == "fp8" else "")
    raise BadInput(
        f"weights quantized by {how} are not supported", where=where, hint="take the original weights, or a GGUF file"
    )


def _plain(hub: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json without quantization, because weights are plain once they are read."""
    return {key: value for key, value in (hub or {}).items() if key != "quantization_config"}


def check_bounds(hub: dict[str, Any], where: str) -> None:
    """Checks that the sizes in a config.json are plausible, before anything is built layer by layer.

    Raises:
        BadInput: thousands of layers, or values nested too deeply.
    """
    for key, value in hub.items():
        if "layer" in key and type(value) is int and abs(value) > MOST_LAYERS:
            raise BadInput(f"config.json: `{key}` = {value:.4g}: at most {MOST_LAYERS:,} are supported", where=where)
        if depth(value, MOST_DEPTH) > MOST_DEPTH:
            raise BadInput(f"config.json: `{key[:80]}` is nested over {MOST_DEPTH} deep", where=where)
    if not isinstance(hub.get("quantization_config") or {}, dict):
        raise BadInput("config.json: `quantization_config` is not an object", where=where)


def depth(value: Any, most: int) -> int:
    """How deeply a JSON value is nested; counting stops at `most` + 1."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((depth(one, most - 1) for one in inner), default=0) if most >= 0 else 0


def known_as(reader: Reader, prefixes: Sequence[str], old: Mapping[str, str], known: Collection[str]) -> Reader:
    """The tensors under the names the model expects. Their names may differ by a prefix (a model saved with or without its head
    has different prefixes) or by an old ending. Where a tensor exists under both names, the expected one is used."""
    name_of = {name: name for name in reader.names}
    for name in set(reader.names) - set(known):
        newer = next((name.removesuffix(end) + new for end, new in old.items() if name.endswith(end)), name)
        others = [newer, *(other for prefix in prefixes for other in (prefix + newer, newer.removeprefix(prefix)))]
        if (other := next((other for other in others if other in known), name)) not in name_of:
            name_of[other] = name_of.pop(name)
    return View(reader, names=name_of)


class Mapped:
    """A reader that gives another format's tensors under our per-layer names, through a `KeyMap`."""

    def __init__(self, table: KeyMap, reader: Reader, where: str):
        self.table, self.reader = table, reader
        try:
            shapes = table.plan({name: reader.shape(name) for name in reader.names})
        except BadInput as error:
            raise BadInput(error.what, where=f"{where}: {error.where}", hint=error.hint) from None
        self._theirs = {path: name for name, ours in table.ours_of(reader.names).items() for path in ours}
        # In the order of the files, so that they are read sequentially.
        self._shapes = {path: shapes[path] for path in self._theirs if path in shapes}

    def over(self, reader: Reader) -> "Mapped":
        """The same tensors, read through another reader."""
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
        """The name of a tensor of theirs that this one is made from; there may be others."""
        return self._theirs[name]

    def is_apart(self, name: str) -> bool:
        return self.table.is_apart(name)

    def read_part(self, name: str, i: int) -> np.ndarray:
        return self.table.read_part(self.reader, name, i) if self.is_apart(name) else self.read(name)[i]

    @property
    def scaled(self) -> list[str]:
        """The names of tensors computed from values and scales."""
        return [name for name in self.names if self.table.is_scaled(name)]


def open_folder(folder: Path, warn: Callable[[str], None] = lambda _: None) -> Stored:
    """Opens a Hub folder.

    Args:
        warn: called with a sentence about tensors that the model does not use.

    Raises:
        BadInput: the architecture is not built, or tensors are missing, unexpected or of the wrong shape, all listed.
        Damaged: files contradict themselves.
    """
    hub = read_json(folder / "config.json")
    config = config_from(hub, str(folder / "config.json"))
    tensors: Reader = Folder.open(folder)
    if config.hub_prefixes or config.hub_old_ends:
        tensors = known_as(tensors, config.hub_prefixes, config.hub_old_ends, KeyMap(*config.hub_rows()).names)
    declared, config = config, config.fitted(tensors.names)
    for key in type(config).model_fields:
        stated, found = getattr(declared, key), getattr(config, key)
        if stated != found and key not in config.hub_unsaid:
            warn(f"{folder}: config.json has {key} = {stated}, but the tensors have {key} = {found}, which is used")
    left_out = [n for n in tensors.names if any(fnmatchcase(n, pattern) for pattern in config.hub_left_out)]
    if left_out:
        many = plural(len(left_out), "tensor", "is", "are")
        warn(f"{folder}: {many} ignored because the model does not use them: {_patterns(left_out)}")
    hub = type(config).hub_text(hub)
    rows, sizes = config.hub_rows()
    if hub.get("quantization_config"):
        rows = config.hub_scaled(rows, tensors.names)
    table = KeyMap(rows, sizes, ignore=(*IGNORED, *config.hub_ignore, *config.hub_left_out))
    check_vocabulary(rows, sizes, tensors, str(folder))
    return Stored(folder, "hub", config, Mapped(table, tensors, str(folder)), folder, hub)


def _patterns(names: list[str]) -> str:
    return ", ".join(sorted({name.split(".")[0] + ".*" for name in names}))


def check_vocabulary(rows: list[Row], sizes: Mapping[str, int], tensors: Reader, where: str) -> None:
    """Checks that `vocab_size` in config.json is the number of rows of the embedding. It often is not, where a vocabulary was
    padded or extended. transformers refuses such folders too, because the softmax would be different.

    Raises:
        BadInput: gives both numbers, and what to write.
    """
    for row in rows:
        if row.ours != "embed.w" or not isinstance(row.theirs, str) or row.theirs not in tensors.names:
            continue
        axes, shape = How.parse(row.how).theirs[0].axes, tensors.shape(row.theirs)
        if ("V",) not in axes or len(shape) != len(axes):
            continue
        found = shape[axes.index(("V",))]
        if found != sizes["V"]:
            raise BadInput(
                f"config.json says `vocab_size` is {sizes['V']}, and `{row.theirs}` has {plural(found, 'row')}",
                where=f"in {where}",
                hint=f'if the vocabulary was padded or extended, write "vocab_size": {found} into config.json',
            )


def check_tied(stored: Stored) -> None:
    """Checks that a stored head equals the embedding if the config ties them. Without this check the difference would be found
    only when the head is read.

    Raises:
        BadInput: they differ.
    """
    if stored.kind != "hub" or not isinstance(stored.weights, Mapped):
        return
    for row in stored.config.hub_rows()[0]:
        if {row.tied_to, *row.copies} & set(stored.weights.reader.names) and isinstance(row.ours, str):
            stored.weights.read(row.ours)


def folder_of(
    config: LanguageConfig,
    weights: Reader,
    *,
    hub: dict[str, Any] | None = None,
    dtype: Any = None,
    shard_bytes: float = 5e9,
) -> list[File]:
    """The files of a Hub folder for a model, including config.json.

    Args:
        hub: the config.json it was loaded with; everything in it that is not architecture (token ids and so on) is kept.
        dtype: the type of the tensors, as in `typed`.

    Raises:
        BadInput: weights are missing, unexpected or of the wrong shape, all listed.
        Unsupported: safetensors has no name for the type.
    """
    entries = list(KeyMap(*config.hub_rows()).inverse(typed(config, weights, dtype)))
    kind = Counter(str(entry.dtype) for entry in entries).most_common(1)[0][0]
    written = _plain(hub) | _kept_type(hub, config.to_hub()) | {"dtype": kind, "torch_dtype": kind}
    return [*folder_files(entries, shard_bytes), of_text("config.json", json.dumps(written, indent=2) + "\n")]


def save_folder(
    folder: str | Path,
    config: LanguageConfig,
    weights: Reader,
    *,
    hub: dict[str, Any] | None = None,
    companions: Path | None = None,
    dtype: Any = None,
    shard_bytes: float = 5e9,
) -> None:
    """Writes a Hub folder in place, with a slab of one tensor in memory at a time. Arguments and errors as `folder_of`, and

    Args:
        companions: a folder whose small files are copied.
    """
    for file in [*folder_of(config, weights, hub=hub, dtype=dtype, shard_bytes=shard_bytes), *copies(companions)]:
        write_file(Path(folder) / file.name, file)


def copies(companions: Path | None) -> list[File]:
    """The small files that belong to a folder's model, each under its path relative to the folder."""
    if companions is None or not companions.is_dir():
        return []
    files = matching(companions, COMPANIONS)
    return [of_bytes(file.relative_to(companions).as_posix(), file.read_bytes()) for file in files]


def typed(config: LanguageConfig, weights: Reader, dtype: Any) -> Reader:
    """Per-layer weights in another type. Weights that would change discrete choices if they were rounded keep their type
    (`weight.exact`).

    Args:
        dtype: one type for all, or {name: type}. None, and names that are not in the mapping: the stored type.
    """
    if dtype is None:
        return weights
    kinds = dtype if isinstance(dtype, Mapping) else dict.fromkeys(weights.names, dtype)
    dtypes = {name: np.dtype(kinds[name]) for name in set(kinds) - exact(config.build())}
    return View(weights, dtypes=dtypes)


def _kept_type(hub: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The name of the original folder's architecture, if it is read in the same way as ours."""
    if (
        hub
        and hub.get("architectures")
        and str(hub["architectures"][0]).endswith(SCORING) == str(new["architectures"][0]).endswith(SCORING)
        and config_from(hub | new | {"model_type": hub["model_type"]}, "").to_hub() == new
    ):
        return new | {k: hub[k] for k in ("model_type", "architectures")}
    return new
