"""Hub folders in and out: config.json, safetensors, and the small files beside them.

Reading maps files and permutes views: a folder of any size opens at once and each tensor is touched when it is wanted. No
pickle is read, and `auto_map` in a config imports nothing.
"""

import json
import shutil
from collections.abc import KeysView
from pathlib import Path
from typing import Any

import numpy as np

from argosy.checkpoint.stored import COMPANIONS, Stored
from argosy.core.errors import BadInput, Damaged, nearest
from argosy.core.formats import Entry, Reader
from argosy.core.formats.safetensors import Folder, write_folder
from argosy.core.keymap import KeyMap
from argosy.models import FAMILIES
from argosy.models.family import FamilyConfig

CONFIG_BYTES = 16 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size.

    Raises:
        Damaged: it is none.
    """
    if path.stat().st_size > CONFIG_BYTES:
        raise Damaged(f"{path.name} has {path.stat().st_size} bytes", where=str(path))
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path.name} is not JSON: {str(error)[:120]}", where=str(path)) from None
    if not isinstance(value, dict):
        raise Damaged(f"{path.name} is not an object", where=str(path))
    return value


def config_from(hub: dict[str, Any], where: str) -> FamilyConfig:
    """The settings that a config.json stands for.

    Raises:
        BadInput: an architecture that is not built, or a key that would change the numbers.
    """
    kind = hub.get("model_type")
    families = {t: FAMILIES[name] for name in FAMILIES for t in FAMILIES[name].hub_types}
    if not isinstance(kind, str) or kind not in families:
        raise BadInput(f"architecture `{kind}` is not built", where=where, hint=nearest(str(kind), families))
    if hub.get("quantization_config"):
        method = str(hub["quantization_config"].get("quant_method", "?"))[:40]
        raise BadInput(
            f"weights quantised by `{method}` are not read",
            where=where,
            hint="take the original weights, or a GGUF file",
        )
    try:
        return families[kind].from_hub(hub)
    except BadInput as error:
        raise BadInput(error.what, where=error.where or where, hint=error.hint) from None
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"config.json does not make a model: {_first(error)}", where=where) from None


def _first(error: Exception) -> str:
    """The first complaint of a validation, in one line."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error).splitlines()[0][:200]
    one = errors()[0]
    return f"{'.'.join(map(str, one['loc']))}: {one['msg']}"


class Mapped:
    """Another format's tensors under our per-layer names, through a `KeyMap`."""

    def __init__(self, table: KeyMap, reader: Reader, where: str):
        self.table, self.reader = table, reader
        try:
            self._shapes = table.plan({name: reader.shape(name) for name in reader.names})
        except BadInput as error:
            raise BadInput(error.what, where=f"{where}: {error.where}", hint=error.hint) from None

    @property
    def names(self) -> KeysView[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        theirs = next(t for t, ours in self.table.ours_of(self.reader.names).items() if name in ours)
        return self.reader.dtype(theirs)

    def read(self, name: str) -> np.ndarray:
        return self.table.read(self.reader, name)


def open_folder(folder: Path) -> Stored:
    """A Hub folder.

    Raises:
        BadInput: an architecture that is not built; tensors missing, unexpected or misshapen, all listed.
        Damaged: files that contradict themselves.
    """
    hub = read_json(folder / "config.json")
    config = config_from(hub, str(folder / "config.json"))
    table = KeyMap(*config.hub_rows())
    return Stored(folder, "hub", config, Mapped(table, Folder.open(folder), str(folder)), folder, hub)


def save_folder(
    folder: str | Path,
    config: FamilyConfig,
    weights: Reader,
    *,
    hub: dict[str, Any] | None = None,
    companions: Path | None = None,
    dtype: Any = None,
    shard_bytes: float = 5e9,
) -> None:
    """Writes a Hub folder, one tensor in memory at a time.

    Args:
        hub: the config.json it once came with; what is not architecture (token ids, and so on) is carried along.
        companions: a folder whose small files are copied.
        dtype: of the tensors; theirs unless told.
    """
    folder = Path(folder)
    entries = list(KeyMap(*config.hub_rows()).inverse(weights))
    if dtype is not None:
        entries = [_cast(entry, np.dtype(dtype)) for entry in entries]
    write_folder(folder, entries, shard_bytes)
    written = (
        dict(hub or {})
        | _kept_type(hub, config.to_hub())
        | {"dtype": _name(entries[0].dtype), "torch_dtype": _name(entries[0].dtype)}
    )
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    if companions is not None and companions.is_dir():
        for name in COMPANIONS:
            if (companions / name).is_file() and (companions / name).resolve() != (folder / name).resolve():
                shutil.copyfile(companions / name, folder / name)


def _kept_type(hub: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The architecture's own name, where the folder it came from had another that reads the same."""
    if (
        hub
        and hub.get("architectures")
        and config_from(hub | new | {"model_type": hub["model_type"]}, "").to_hub() == new
    ):
        return new | {k: hub[k] for k in ("model_type", "architectures")}
    return new


def _cast(entry: Entry, dtype: np.dtype) -> Entry:
    return Entry(entry.name, entry.shape, dtype, lambda: entry.make().astype(dtype, copy=False))


def _name(dtype: np.dtype) -> str:
    return str(np.dtype(dtype))
