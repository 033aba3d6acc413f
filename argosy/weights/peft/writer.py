"""Writes the adapters of a model as a folder of the PEFT library, and those of a denoiser also as the file that diffusers loads.

If the Hub fuses weights whose adapters have different A, these become one adapter. Its rank is the sum of their ranks, and its B is
block-diagonal, which gives the same function without rounding. The initial factors of PiSSA are written as further columns with the
opposite sign, as PEFT does when it converts PiSSA to LoRA.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from flax import nnx

from argosy.adapt.base import FACTORS, retrained_addresses
from argosy.adapt.lora import LoRA
from argosy.adapt.surgery import find
from argosy.core.addresses import is_hub
from argosy.core.errors import BadInput, Unsupported, some
from argosy.core.formats import Arrays, TensorEntry
from argosy.core.formats.files import File, of_text
from argosy.core.formats.safetensors import tensors_file
from argosy.core.hub.names import HubName, name_of_path
from argosy.core.keymap import KeyMap, KeyRow, Rearrangement
from argosy.models.diffusion.base import DenoiserConfig
from argosy.models.parts.stack.addresses import stored_addresses
from argosy.models.parts.weight import split
from argosy.weights.hub.image_lora import FILE as IMAGE_FILE
from argosy.weights.peft.sites import (
    CONFIG,
    PREFIX,
    SCORES,
    WEIGHTS,
    Adapter,
    PeftContents,
    Site,
    check_tied_adapter,
    sites,
    tied_names,
)
from argosy.weights.staging import StagedFolder, is_occupied


def adapters_of(model: Any) -> dict[str, Adapter]:
    """Returns the adapters of a model with unrolled or scanned layers, by the per-layer name of their contraction.

    Raises:
        BadInput: the model has no adapters.
    """
    modules = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model) if isinstance(m, LoRA)}
    arrays = split(model)[1]
    layers: dict[str, dict[str, np.ndarray]] = {}
    of: dict[str, LoRA] = {}
    for layer, (address, i) in stored_addresses(model).items():
        stored, _, factor = address.rpartition(".")
        if stored in modules and factor in FACTORS:
            name = layer.rpartition(".")[0]
            layers.setdefault(name, {})[factor] = np.asarray(arrays[address] if i is None else arrays[address][i])
            of[name] = modules[stored]
    out = {}
    for name, factors in sorted(layers.items()):
        a, b, module = factors["a"], factors["b"], of[name]
        if "a0" in factors:
            # In B, the rank is the axis after the group.
            a, b = np.concatenate([a, factors["a0"]], -1), np.concatenate([b, -factors["b0"]], len(module.group))
        out[name] = Adapter(a, b, module.gain, factors.get("m"))
    if not out:
        raise BadInput(
            "the model has no adapters", hint="put some on it first: adapt.surgery.swap with adapt.lora.LoRA"
        )
    return out


def contents_of(model: Any) -> PeftContents:
    """Returns the contents of the PEFT folder of a model with unrolled or scanned layers.

    Raises:
        BadInput: the model has no adapters.
    """
    arrays, mine = split(model)[1], retrained_addresses(model)
    places = {name: at for name, at in stored_addresses(model).items() if at[0] in mine}
    whole = {name: np.asarray(arrays[address] if i is None else arrays[address][i]) for name, (address, i) in places.items()}
    adapters = adapters_of(model)
    return PeftContents(adapters, whole, max(module.dropout for module in find(model, ".*", LoRA).values()))


def write_adapter(
    folder: str | Path,
    config: Any,
    adapters: Mapping[str, Adapter],
    base: str | None = None,
    whole: Mapping[str, np.ndarray] = MappingProxyType({}),
    dropout: float = 0.0,
) -> None:
    """Writes adapters as a PEFT folder.

    Args:
        config: the config of the model.
        adapters: the adapters, by the per-layer name of their contraction.
        base: the name of the base model, for adapter_config.json.
        whole: the weights of modules that were trained in full, by per-layer name.
        dropout: the dropout rate that the adapters were trained with.

    Raises:
        BadInput: the folder is not empty.
        Unsupported: PEFT has no name for the weight of an adapter, or only a part of a Hub module was trained in full.
    """
    folder = Path(folder)
    if is_occupied(folder):
        raise BadInput(f"{folder} is not empty", hint="name a new folder; nothing is ever overwritten")
    theirs, modules = factors_of(config, adapters)
    in_full = _whole_theirs(config, whole)
    theirs |= {PREFIX + name: array for name, array in in_full.items()}
    magnitudes = {adapter.m is not None for adapter in adapters.values()}
    if len(magnitudes) > 1:
        raise Unsupported("DoRA on some weights and LoRA on others: PEFT has one of them", hint="merge them instead")
    entries = [
        TensorEntry(name, array.shape, array.dtype, lambda array=array: array) for name, array in sorted(theirs.items())
    ]
    files = [tensors_file(WEIGHTS, entries, {"format": "pt"})]
    if isinstance(config, DenoiserConfig) and not in_full and not magnitudes - {False}:
        files.append(image_adapter_file(config, theirs, modules))
    adapter_config = _config(modules, base, magnitudes.pop()) | {"lora_dropout": dropout}
    adapter_config |= {"modules_to_save": sorted({name.rpartition(".")[0] for name in in_full}) or None}
    adapter_config |= {"task_type": SCORES} if config.scored else {}
    files.append(of_text(CONFIG, json.dumps(adapter_config, indent=2) + "\n"))
    # The folder is written completely or not at all.
    with StagedFolder(folder, None) as part:
        part.plan(files)
        part.write(files)
        part.commit()


def factors_of(
    config: Any, adapters: Mapping[str, Adapter]
) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, float]]]:
    """Returns the factors of adapters by PEFT's names, and {module: (rank, gain)}.

    Raises:
        Unsupported: PEFT has no name for the weight of an adapter.
    """
    theirs, modules = dict[str, np.ndarray](), dict[str, tuple[int, float]]()
    homes = {name: site for site in sites(config) for name in site.weights}
    if homeless := sorted(set(adapters) - set(homes)):
        raise Unsupported(f"PEFT has no name for adapters on {some(homeless)}", hint="merge them instead")
    sizes = config.hub_rows()[1]
    for site in dict.fromkeys(homes[name] for name in adapters):
        check_tied_adapter(site, config)
        parts = [adapters.get(name) for name in site.weights]
        for name, array, rank, gain in _theirs(site, parts, sizes):
            theirs[name] = array
            modules[re.sub(r"\.lora_.*", "", name.removeprefix(PREFIX))] = (rank, gain)
    return theirs, modules


def image_adapter_file(
    config: DenoiserConfig, theirs: Mapping[str, np.ndarray], modules: Mapping[str, tuple[int, float]]
) -> File:
    """Returns `pytorch_lora_weights.safetensors`, which diffusers pipelines load (`load_lora_weights`), with ranks and alphas in its
    metadata.

    Args:
        theirs, modules: the results of `factors_of`.
    """
    part = config.pipeline_part
    entries = [
        TensorEntry(f"{part}.{name.removeprefix(PREFIX)}", array.shape, array.dtype, lambda array=array: array)
        for name, array in sorted(theirs.items())
    ]
    adapter_config = _config(modules, None, False)
    keys = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules")
    metadata = {f"{part}.{key}": adapter_config[key] for key in keys}
    return tensors_file(IMAGE_FILE, entries, {"format": "pt", "lora_adapter_metadata": json.dumps(metadata, sort_keys=True)})


def _whole_theirs(config: Any, whole: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the weights of modules that were trained in full, by their names on the Hub. A tied head is written too, because PEFT
    copies an embedding without the head that is tied to it."""
    rows, sizes = config.hub_rows()
    mine = [_at(row, layer) for row in rows for layer in (None,) if row.layers is None]
    mine += [_at(row, layer) for row in rows for layer in row.layers or ()]
    mine = [row for row in mine if any(path in whole for path in _paths(row))]
    for row in mine:
        if lost := [path for path in _paths(row) if path not in whole]:
            problem = f"`{row.names}` is one weight for the PEFT library, of which {some(lost)} was not trained in full"
            raise Unsupported(problem, hint="adapter.train=... for all of them, or merge instead")
    out = {}
    for entry in KeyMap(mine, sizes).inverse(Arrays(whole)):
        out[entry.name] = np.ascontiguousarray(entry.make(), np.float32)
    return out | {head: out[embedding] for embedding, head in tied_names(config) if embedding in out}


def _paths(row: KeyRow) -> tuple[str, ...]:
    return (row.paths,) if isinstance(row.paths, str) else row.paths


def _at(row: KeyRow, layer: int | None) -> KeyRow:
    """Returns the row of one layer, with the index in place of `{l}`."""

    def filled(names: Any) -> Any:
        single = isinstance(names, str)
        return names.replace("{l}", str(layer)) if single else tuple(name.replace("{l}", str(layer)) for name in names)

    # Copies belong to modules for multi-token prediction, which the library's model does not have.
    return replace(row, names=filled(row.names), paths=filled(row.paths), layers=None, copies=())


def _theirs(
    site: Site, parts: Sequence[Adapter | None], sizes: Mapping[str, int]
) -> Iterator[tuple[str, np.ndarray, int, float]]:
    """Yields (name, factor, rank, gain) for the factors of one Hub module. `parts`: the adapter of each contraction in the module."""
    present = [part for part in parts if part is not None]
    dora = [part.m is not None for part in present]
    if any(dora) and not (all(dora) and len(present) == len(parts)):
        problem = f"DoRA on a part of `{site.module}`, which is one matrix for the PEFT library"
        raise Unsupported(problem, hint=f"adapt all of {', '.join(site.weights)}, or merge instead")
    shared = len(present) == len(parts) and all(
        part.gain == present[0].gain and np.array_equal(part.a, present[0].a) for part in present
    )
    if shared:
        a, bs, gain = present[0].a, [part.b for part in present], present[0].gain
    # With different A, the ranks are concatenated, and each adapter's B is nonzero only at its own ranks.
    else:
        gain = 1.0
        a = np.concatenate([part.a for part in present], -1)
        axis = 1 if "{e}" in site.module else 0
        bs, start = [], 0
        for i, part in enumerate(parts):
            shape = list(part.b.shape if part else Rearrangement.parse(site.how_b).right[i].shape(dict(sizes) | {"r": 0}))
            shape[axis] = a.shape[-1]
            b = np.zeros(shape, np.float32)
            if part is not None:
                where = [slice(None)] * b.ndim
                where[axis] = slice(start, start + part.a.shape[-1])
                b[tuple(where)] = part.gain * part.b
                start += part.a.shape[-1]
            bs.append(b)
    rank = a.shape[-1]
    table = KeyMap(site.rows(0, any(dora)), dict(sizes) | {"r": rank})
    ours = {f"{site.weights[0]}.a": a} | {f"{name}.b": b for name, b in zip(site.weights, bs)}
    ours |= {f"{name}.m": part.m for name, part in zip(site.weights, parts) if part is not None and part.m is not None}
    for entry in table.inverse(Arrays({name: np.asarray(array, np.float32) for name, array in ours.items()})):
        yield entry.name, np.ascontiguousarray(entry.make()), rank, gain


def _config(modules: Mapping[str, tuple[int, float]], base: str | None, dora: bool) -> dict[str, Any]:
    ranks = [rank for rank, _ in modules.values()]
    rank = max(set(ranks), key=ranks.count)
    alphas = {module: gain * r for module, (r, gain) in modules.items()}
    alpha = max(set(alphas.values()), key=list(alphas.values()).count)
    hub_name = None if base is None else HubName.parse(base) if is_hub(base) else name_of_path(base)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if hub_name is None else hub_name.repository,
        "revision": hub_name.revision if hub_name else None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": dora,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "target_modules": sorted(modules),
        "rank_pattern": {module: r for module, (r, _) in modules.items() if r != rank},
        "alpha_pattern": {module: a for module, a in alphas.items() if a != alpha},
        "inference_mode": True,
    }
