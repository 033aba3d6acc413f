"""Defines the names of the contents of a checkpoint, and writes the files that Orbax needs to find its arrays.

    weights/  state/      arrays; also data/, if the position in the data has arrays
    meta.json             data position, settings, evaluation
    manifest.json         size and hash of every file; the step is a checkpoint once this file is written, the last one
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from argosy.core.formats import TensorEntry
from argosy.core.formats.files import File, of_text
from argosy.core.formats.zarr import array_files

Arrays = dict[str, Any]  # {name: array}
WEIGHTS, STATE, DATA, META = "weights", "state", "data", "meta.json"


def array_by_array(entries: Iterable[TensorEntry], item: str = WEIGHTS) -> list[File]:
    """Returns the files of a checkpoint item, which can be written with one array in memory at a time. Orbax can read them. The arrays
    are not compressed.

    Raises:
        Unsupported: checkpoints have no name for the type.
    """
    entries = list(entries)
    files = [file for entry in entries for file in array_files(entry)]
    return [*(file._replace(name=f"{item}/{file.name}") for file in files), *catalog({item: [e.name for e in entries]})]


def catalog(items: Mapping[str, Iterable[str]]) -> list[File]:
    """Returns the files that tell Orbax the arrays of each item, each of which is a folder.

    Args:
        items: the names of the arrays of each item.
    """
    about = {"value_type": "np.ndarray", "skip_deserialize": False}
    layout = {"use_ocdbt": False, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
    handler = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
    times = {"init_timestamp_nsecs": None, "commit_timestamp_nsecs": None}
    checkpoint = {"item_handlers": dict.fromkeys(items, handler), "metrics": {}, "performance_metrics": {}, "custom_metadata": {}}
    files = [of_text("_CHECKPOINT_METADATA", json.dumps(checkpoint | times))]
    for item, names in items.items():
        tree = {f"('{name}',)": {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": about} for name in names}
        files.append(of_text(f"{item}/_METADATA", json.dumps({"tree_metadata": tree, **layout, "custom_metadata": None})))
    return files


def is_description(name: str) -> bool:
    """Whether a file of a step describes it, and is not a shard of weights or state."""
    return name.startswith(f"{DATA}/") or name.rpartition("/")[2] in ("zarr.json", "_METADATA", "_CHECKPOINT_METADATA", META)
