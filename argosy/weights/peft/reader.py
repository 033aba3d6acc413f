"""Reads low-rank adapters from the PEFT library's folders, adapter_config.json and adapter_model.safetensors, and puts them on models.

The gain is alpha / r, or alpha / sqrt(r) with `use_rslora`. Ranks and alphas may differ by module (`rank_pattern`, `alpha_pattern`).
Features that change the function and are not implemented are refused. They are trained biases, and initializations that also change
the base (PiSSA and others), which PEFT repeats on the base whenever it loads such a folder.

Beside adapters on an embedding or a head, PEFT saves the base's own weight (`base_layer.weight`). It must equal the weight of the base
that the adapters are loaded onto.

Modules that were trained in full (`modules_to_save`) are stored beside the factors under their own names. PEFT copies such a module,
which unties it: if an embedding and a head are tied, PEFT trains one and leaves the other unchanged. So both are written, and a folder
with only one of them is refused unless it says `ensure_weight_tying`. With the task type SEQ_CLS the model has a head of scores
(`score`).
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput, Unsupported, nearest, some
from argosy.core.formats import TensorReader, TensorView
from argosy.core.formats.safetensors import SafeTensors
from argosy.core.keymap import KeyMap
from argosy.weights.hub.config import read_json_object
from argosy.weights.peft.sites import (
    CONFIG,
    FILES,
    PREFIX,
    SCORES,
    UNDER,
    WEIGHTS,
    Adapter,
    PeftContents,
    check_tied_adapter,
    modules_of,
    sites,
    tied_names,
)

# Keys that may change the function, and the values at which they do not.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
}

# Values of `init_lora_weights` that leave the base as it is. With the others, PEFT changes the base when the adapter is made and each
# time that it is loaded: it subtracts the initial adapter (PiSSA, OLoRA, CorDA, LoRA-GA), or replaces the base (LoftQ).
PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


def read_adapter(folder: str | Path, config: Any) -> Mapping[str, Adapter]:
    """Reads a PEFT folder that holds only adapters. Returns them by the per-layer name of the contraction that each adapts.

    Raises:
        BadInput: an error of `read_contents`.
        Unsupported: an error of `read_contents`, or the folder has modules that were trained in full or weights of the base.
    """
    contents = read_contents(folder, config)
    hint = "argosy.load(MODEL, adapter=FOLDER) takes one alone; argosy convert merges it"
    if contents.whole:
        problem = f"modules trained in full beside other adapters are not built: {some(sorted(contents.whole))}"
        raise Unsupported(problem, where=str(folder), hint=hint)
    if contents.base:
        problem = f"weights of the base beside other adapters are not built: {some(sorted(contents.base))}"
        raise Unsupported(problem, where=str(folder), hint=f"save it with save_embedding_layers=False; or {hint}")
    return contents.adapters


def config_for(folder: str | Path, config: Any) -> Any:
    """Returns the config of a model after a PEFT folder is put on it: with a head of scores where the folder contains one.

    Args:
        config: the config of the base model.

    Raises:
        Unsupported: the family has no such head.
    """
    folder = Path(folder)
    if not all((folder / name).is_file() for name in FILES):
        return config
    if str(read_json_object(folder / CONFIG).get("task_type")) != SCORES or config.scored:
        return config
    if "scores" not in type(config).model_fields:
        raise Unsupported("models of this family have no head of scores yet", where=str(folder / CONFIG))
    file, weight_name = SafeTensors.open(folder / WEIGHTS), f"{PREFIX}score.weight"
    if weight_name not in file.names:
        raise BadInput(f"the task type is {SCORES}, and there is no `{weight_name}`", where=str(folder))
    return config.model_copy(update={"scores": file.shape(weight_name)[0]})


def read_contents(folder: str | Path, config: Any) -> PeftContents:
    """Reads the adapters of a PEFT folder and the modules that were trained in full.

    Args:
        config: the config of the model with the folder's head (`config_for`).

    Raises:
        BadInput: the folder is not one of PEFT, factors are missing or of the wrong shape, or modules do not exist in the model. All
            are listed.
        Unsupported: the folder uses a feature that changes the function and is not implemented.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        # A run keeps its adapter in a folder of its own.
        inside = folder / "adapter"
        hint = f"adapter={inside}" if (inside / CONFIG).is_file() else "give a folder that PEFT's save_pretrained wrote"
        raise BadInput(f"no {CONFIG}", where=str(folder), hint=hint)
    keys = read_json_object(folder / CONFIG)
    _check(keys, folder)
    if not (folder / WEIGHTS).is_file():
        raise BadInput(f"no {WEIGHTS}", where=str(folder), hint="weights saved as pickles are never read")
    file = SafeTensors.open(folder / WEIGHTS)
    out, used = dict[str, Adapter](), set[str]()
    sizes, experts, dora = config.hub_rows()[1], config.dims.get("E", 0), bool(keys.get("use_dora"))
    for site in sites(config):
        names = [[n.replace("{e}", str(e)) for e in range(experts if "{e}" in n else 1)] for n in site.names()]
        if not any(name in file.names for name in (*names[0], *names[1])):
            continue
        rank = file.shape(names[0][0])[0] if names[0][0] in file.names else 0
        used.update(*names)
        check_tied_adapter(site, config)
        if dora:
            used.update(site.magnitude().replace("{e}", str(e)) for e in range(len(names[0])))
            if site.table:
                raise Unsupported(f"DoRA on the embedding `{site.module}`: not built", hint="merge it with PEFT first")
        gain = _gain(keys, site.module, rank, len(names[0]))
        for part, ours in enumerate(site.weights):
            table = KeyMap(site.rows(part, dora), sizes | {"r": rank})
            read = {factor: table.read(file, f"{ours}.{factor}") for factor in ("abm" if dora else "ab")}
            out[ours] = Adapter(read["a"], read["b"], gain, read.get("m"))
    choosing = tuple(f"{PREFIX}{module}.lora_" for module, _, _, weights in modules_of(config) if weights[0].chooses)
    if index := [name for name in set(file.names) - used if choosing and name.startswith(choosing)]:
        if any(file.read(name).any() for name in index if ".lora_B." in name):
            problem = (
                f"adapters on the indexer of sparse attention, which only selects keys: {some(sorted(index))}"
            )
            raise Unsupported(problem, hint="leave it out of target_modules")
        # B is zero for these, because no gradient reaches it.
        used.update(index)
    whole, names = _read_whole(keys, file, config, folder)
    base, base_names = _read_base(file, config)
    used.update(names, base_names)
    for _, head in tied_names(config):
        if any(name.startswith(f"{PREFIX}{head.removesuffix('weight')}lora_") for name in file.names):
            problem = f"an adapter on `{head.removesuffix('.weight')}`, which is tied to the embedding: not built"
            raise Unsupported(problem, where=str(folder), hint="untie the head first, or leave it out of the adapter")
    if strange := sorted(set(file.names) - used):
        hint = nearest(strange[0], [name for site in sites(config) for name in site.names()])
        problem = f"{plural(len(strange), 'tensor', 'belongs', 'belong')} to no module of this model: {', '.join(strange[:4])}"
        raise BadInput(problem, where=str(folder), hint=hint)
    if not out:
        raise BadInput("the folder has no adapter", where=str(folder))
    return PeftContents(out, whole, _number(keys.get("lora_dropout") or 0.0, "lora_dropout"), base)


def _read_whole(
    keys: Mapping[str, Any], file: SafeTensors, config: Any, folder: Path
) -> tuple[dict[str, np.ndarray], set[str]]:
    """Reads the weights of modules that were trained in full. Returns them by per-layer name, and their names in the file.

    Raises:
        BadInput: a part of a weight is missing or has another shape, or a head differs from the embedding that it is tied to.
        Unsupported: the model ties embedding and head, and the file has only one of them.
    """
    table = KeyMap(*config.hub_rows())
    theirs = TensorView(file, names={name.removeprefix(PREFIX): name for name in file.names if name.startswith(PREFIX)})
    for embedding, head in tied_names(config):
        both = [name for name in (embedding, head) if name in theirs.names]
        if both == [head] or (both == [embedding] and not keys.get("ensure_weight_tying")):
            problem = f"`{both[0]}` was trained in full, and the model ties `{embedding}` and `{head}`, so that PEFT unties them"
            raise Unsupported(problem, where=str(folder), hint="untie the model first, or train again with ensure_weight_tying")
    matches = table.ours_of(theirs.names)
    module_names = [name for name in keys.get("modules_to_save") or () if any(_ends(tensor, name) for tensor in table.names)]
    if absent := [name for name in module_names if not any(_ends(there, name) for there in matches)]:
        raise BadInput(f"modules_to_save has {some(absent)}, and the file no such tensors", where=str(folder))
    whole = {path: np.asarray(table.read(theirs, path)) for path in dict.fromkeys(p for paths in matches.values() for p in paths)}
    used = {PREFIX + name for name in matches} | {PREFIX + head for _, head in tied_names(config)}
    return whole, used & set(file.names)


def _read_base(file: SafeTensors, config: Any) -> tuple[dict[str, np.ndarray], set[str]]:
    """Reads the weights of the base that PEFT saved beside adapters. Returns them by per-layer name, and their names in the file."""
    table = KeyMap(*config.hub_rows())
    names = {name.removeprefix(PREFIX).replace(f".{UNDER}", "."): name for name in file.names if f".{UNDER}" in name}
    theirs = TensorView(file, names=names)
    matches = table.ours_of(theirs.names)
    paths = dict.fromkeys(path for paths in matches.values() for path in paths)
    return {path: np.asarray(table.read(theirs, path)) for path in paths}, {names[name] for name in matches}


def check_base(contents: PeftContents, weights: TensorReader) -> None:
    """Compares the weights of the base that a PEFT folder holds with those of the base model, in the narrower of their types.

    Raises:
        Unsupported: a weight differs, because the adapters were trained on a changed base, such as one with further tokens.
    """
    for name, theirs in contents.base.items():
        ours = weights.read(name)
        small = min(ours.dtype, theirs.dtype, key=lambda kind: kind.itemsize)
        if ours.shape != theirs.shape or not np.array_equal(ours.astype(small), theirs.astype(small)):
            problem = f"the folder's own `{UNDER}weight` of `{name.removesuffix('.w')}` is not that of the base model"
            raise Unsupported(problem, hint="they were trained on a changed base, such as one with more tokens: load them onto that")


def _ends(tensor: str, module: str) -> bool:
    """Whether a tensor belongs to a module whose path ends with `module`, which is how PEFT matches names."""
    return f".{tensor.rpartition('.')[0]}".endswith(f".{module}")


def _check(keys: Mapping[str, Any], folder: Path) -> None:
    where = str(folder / CONFIG)
    if str(keys.get("peft_type", "LORA")).upper() != "LORA":
        raise Unsupported(f"adapters of type {keys['peft_type']} are not built", hint="only low-rank adapters (LORA) are")
    wrong = [f"{key} = {keys[key]!r}" for key, plain in PLAIN.items() if key in keys and keys[key] not in plain]
    if wrong:
        problem = f"{', '.join(wrong)}: not built"
        raise Unsupported(problem, where=where, hint="merge the adapter with PEFT first")
    if (start := keys.get("init_lora_weights")) not in PLAIN_INITS:
        problem = f"init_lora_weights = {start!r} changes the weights of the base each time that PEFT loads this folder: not built"
        hint = "save it with PEFT's path_initial_model_for_weight_conversion, which makes it plain LoRA, or merge it with PEFT first"
        raise Unsupported(problem, where=where, hint=hint)
    if not isinstance(patterns := keys.get("alpha_pattern") or {}, dict):
        raise BadInput("alpha_pattern is not an object", where=where, hint="it maps names of modules to alphas")
    if isinstance(modules := keys.get("modules_to_save") or [], str) or not all(isinstance(name, str) for name in modules):
        raise BadInput("modules_to_save is not a list of names", where=where)
    for name, value in {"lora_alpha": keys.get("lora_alpha", 8), **patterns}.items():
        _number(value, name, where)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise BadInput(f"`{pattern}` in alpha_pattern is no pattern: {error}", where=where) from None


def _number(value: Any, name: str, where: str = CONFIG) -> float:
    """Returns a value of the config as a finite float.

    Raises:
        BadInput: the value is not a finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        text = "null" if value is None else repr(value)[:40]
        raise BadInput(f"`{name}` is {text}, not a number", where=where)
    return float(value)


def _gain(keys: Mapping[str, Any], module: str, rank: int, experts: int) -> float:
    """Returns alpha / r, or alpha / sqrt(r) with `use_rslora` (arXiv:2312.03732). `alpha_pattern` may set alpha by module. It is
    matched as in PEFT."""
    alphas = {_alpha(keys, module.replace("{e}", str(e))) for e in range(experts)}
    if len(alphas) > 1:
        raise Unsupported(f"experts of `{module}` with different alphas: not built", hint="merge it with PEFT first")
    return alphas.pop() / (math.sqrt(rank) if keys.get("use_rslora") else rank) if rank else 0.0


def _alpha(keys: Mapping[str, Any], module: str) -> float:
    for pattern, value in (keys.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return float(value)
    return float(keys.get("lora_alpha", 8))
