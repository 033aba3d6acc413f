"""Reads and writes low-rank adapters in the PEFT library's folders: adapter_config.json and adapter_model.safetensors.

Names follow from the family's Hub table. A row of it says how a weight is read, and the two factors of the weight's adapter are
read the same way: A has the axes that the weight sums over, B the others.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight [r in]     layers.3.attn.q.a [D r]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight [out r]    layers.3.attn.q.b [r N H]

Where the Hub fuses weights that are separate here (Phi's qkv_proj), all of them share A. On writing, weights with different A
become one adapter whose rank is the sum of their ranks and whose B is block-diagonal: the same function, without rounding.

The gain is alpha / r, or alpha / sqrt(r) with `use_rslora`; ranks and alphas may differ by module (`rank_pattern`,
`alpha_pattern`). DoRA's magnitudes (`use_dora`) are read as a bias is. What PiSSA started from is written as further columns, with
the opposite sign: PEFT's own conversion of it to LoRA. Features that change the function and are not built are refused: trained
biases.

Modules that were trained in full (`modules_to_save`) lie beside the factors under their own names. PEFT copies such a module, which
unties it: of an embedding and a head that are tied, it trains one and leaves the other. So both are written, and a folder with only
one of them is refused unless it says `ensure_weight_tying`. With the task type SEQ_CLS the model has a head of scores (`score`).
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from argosy.adapt.base import FACTORS, Retrained, retrained
from argosy.adapt.lora import DoRA, LoRA
from argosy.adapt.surgery import at, find, put_at, swap
from argosy.checkpoint.hub import read_json
from argosy.checkpoint.partial import Partial, taken
from argosy.core.counts import plural
from argosy.core.errors import BadInput, Unsupported, nearest, some
from argosy.core.formats import Arrays, Entry, Over, Reader, View
from argosy.core.formats.files import of_text
from argosy.core.formats.safetensors import SafeTensors, tensors_file
from argosy.core.keymap import How, KeyMap, Row
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Unroll, stored_addresses
from argosy.models.parts.weight import put, split, variable

FILES = CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# PEFT's task type of models with a head of scores.
SCORES = "SEQ_CLS"
# Of float32.
SLAB_BYTES = 1 << 26
# Keys that change the function, and the values at which they do not.
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


class Adapter(NamedTuple):
    """The factors of one contraction, in the letters of `adapt.lora`, and the gain of their product. m: DoRA's magnitude of each
    output channel."""

    a: np.ndarray
    b: np.ndarray
    gain: float
    m: np.ndarray | None = None


class Contents(NamedTuple):
    """What a PEFT folder holds: adapters by the per-layer name of their contraction, and the weights of modules that were trained in
    full by their per-layer name. dropout: that the adapters were trained with."""

    adapters: Mapping[str, Adapter]
    whole: Mapping[str, np.ndarray] = MappingProxyType({})
    dropout: float = 0.0


@dataclass(frozen=True)
class Site:
    """A module on the Hub that may carry an adapter, the contractions of ours it covers, and how its factors are read."""

    # Contains {e} if there is one module per expert.
    module: str
    ours: tuple[str, ...]
    how_a: str
    how_b: str
    how_m: str
    # An embedding: PEFT uses other names for its factors.
    table: bool

    def names(self) -> tuple[str, str]:
        """The names of A and B on the Hub."""
        kind = ("lora_embedding_A", "lora_embedding_B") if self.table else ("lora_A.weight", "lora_B.weight")
        return f"{PREFIX}{self.module}.{kind[0]}", f"{PREFIX}{self.module}.{kind[1]}"

    def magnitude(self) -> str:
        """The name of DoRA's magnitudes on the Hub."""
        return f"{PREFIX}{self.module}.lora_magnitude_vector"

    def rows(self, part: int, dora: bool = False) -> list[Row]:
        """The rows of A and B, and of DoRA's magnitudes, for contraction number `part` of the module."""
        a, b = self.names()
        rows = [
            Row(a, f"{self.ours[part]}.a", self.how_a),
            Row(b, tuple(f"{name}.b" for name in self.ours), self.how_b),
        ]
        return [*rows, Row(self.magnitude(), tuple(f"{name}.m" for name in self.ours), self.how_m)] if dora else rows


def sites(config: Any) -> list[Site]:
    """Every module of the Hub's model that a low-rank adapter fits."""
    out = []
    for module, names, row, weights in _modules(config):
        if not weights[0].chooses and (hows := _hows(row.how, weights)) is not None:
            out.append(Site(module, names, *hows, table="V" in weights[0].inner))
    return out


def _modules(config: Any) -> Iterator[tuple[str, tuple[str, ...], Row, list[Contraction]]]:
    """The Hub's modules that hold the weights of our contractions: their names, how they are read, and the contractions."""
    specs = contractions(config)
    for row in config.hub_rows()[0]:
        ours = (row.ours,) if isinstance(row.ours, str) else row.ours
        if not isinstance(row.theirs, str) or not all(path.endswith(".w") for path in ours):
            continue
        for layer in (None,) if row.over is None else row.over:
            names = tuple(path.removesuffix(".w").replace("{l}", str(layer)) for path in ours)
            yield (
                row.theirs.removesuffix(".weight").replace("{l}", str(layer)),
                names,
                row,
                [specs[name] for name in names],
            )


def contractions(config: Any) -> dict[str, Contraction]:
    """The contractions of a model by per-layer name."""
    modules = nnx.iter_modules(config.build(Unroll()))
    return {".".join(map(str, path)): m for path, m in modules if isinstance(m, Contraction)}


def _hows(how: str, weights: Sequence[Contraction]) -> tuple[str, str, str] | None:
    """How A, B and the magnitudes are read, derived from how the weights are read; None if the Hub's weight is not a matrix of
    inputs and outputs."""
    weight = weights[0]
    left, right = how.split("->")
    theirs, parts = _axes(left), [_axes(part) for part in right.split(",")]
    summed = [axis for axis, letter in zip(parts[0], weight.spec) if letter in weight.inner]
    group = [axis for axis, letter in zip(parts[0], weight.spec) if letter in weight.group]
    names = {name for axis in summed for name in re.findall(r"\w+", axis)}
    side = [set(re.findall(r"\w+", axis)) == names for axis in theirs]
    if len(theirs) != 2 or sum(side) != 1:
        return None
    inputs, outputs = theirs[side.index(True)], theirs[side.index(False)]
    kept = [[a for a, x in zip(part, w.spec) if x in w.out and x not in w.inner] for part, w in zip(parts, weights)]
    how_a = f"r {inputs} -> {' '.join([*group, *summed, 'r'])}"
    how_b = f"{outputs} r -> {', '.join(' '.join([*group, 'r', *axes]) for axes in kept)}"
    how_m = f"{outputs} -> {', '.join(' '.join([*group, *axes]) for axes in kept)}"
    return how_a, how_b, how_m


def _axes(side: str) -> list[str]:
    """The axes of one tensor as written in a row: `((N|K|K) H) D` has two."""
    out, depth = [""], 0
    for char in side.strip():
        depth += (char == "(") - (char == ")")
        if char == " " and depth == 0:
            out.append("")
        else:
            out[-1] += char
    return [axis for axis in out if axis]


# ---------------------------------------------------------------- reading


def read_adapter(folder: str | Path, config: Any) -> Mapping[str, Adapter]:
    """Reads a PEFT folder that holds adapters alone, by the name of the contraction that each is on.

    Raises:
        BadInput: as `read_contents`.
        Unsupported: as `read_contents`; or modules were trained in full.
    """
    adapters, whole, _ = read_contents(folder, config)
    if whole:
        what = f"modules trained in full beside other adapters are not built: {some(sorted(whole))}"
        hint = "argosy.load(MODEL, adapter=FOLDER) takes one alone; argosy convert merges it"
        raise Unsupported(what, where=str(folder), hint=hint)
    return adapters


def config_for(folder: str | Path, config: Any) -> Any:
    """The config of the model that a PEFT folder makes of one with this config: with a head of scores where the folder brings one.

    Raises:
        Unsupported: the family has no such head.
    """
    folder = Path(folder)
    if not all((folder / name).is_file() for name in FILES):
        return config
    if str(read_json(folder / CONFIG).get("task_type")) != SCORES or config.scored:
        return config
    if "scores" not in type(config).model_fields:
        raise Unsupported("models of this family have no head of scores yet", where=str(folder / CONFIG))
    file, wanted = SafeTensors.open(folder / WEIGHTS), f"{PREFIX}score.weight"
    if wanted not in file.names:
        raise BadInput(f"the task type is {SCORES}, and there is no `{wanted}`", where=str(folder))
    return config.model_copy(update={"scores": file.shape(wanted)[0]})


def read_contents(folder: str | Path, config: Any) -> Contents:
    """Reads the adapters of a PEFT folder and the modules that were trained in full.

    Args:
        config: of the model with the folder's head (`config_for`).

    Raises:
        BadInput: it is not a PEFT folder, factors are missing or of the wrong shape, or modules do not exist in the model; all
            listed.
        Unsupported: a feature that changes the function and is not built.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise BadInput(f"no {CONFIG}", where=str(folder), hint="give a folder that PEFT's save_pretrained wrote")
    keys = read_json(folder / CONFIG)
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
        _check_tied(site, config)
        if dora:
            used.update(site.magnitude().replace("{e}", str(e)) for e in range(len(names[0])))
            if site.table:
                raise Unsupported(f"DoRA on the embedding `{site.module}`: not built", hint="merge it with PEFT first")
        gain = _gain(keys, site.module, rank, len(names[0]))
        for part, ours in enumerate(site.ours):
            table = KeyMap(site.rows(part, dora), sizes | {"r": rank})
            read = {factor: table.read(file, f"{ours}.{factor}") for factor in ("abm" if dora else "ab")}
            out[ours] = Adapter(read["a"], read["b"], gain, read.get("m"))
    choosing = tuple(f"{PREFIX}{module}.lora_" for module, _, _, weights in _modules(config) if weights[0].chooses)
    if index := [name for name in set(file.names) - used if choosing and name.startswith(choosing)]:
        if any(file.read(name).any() for name in index if ".lora_B." in name):
            what = (
                f"adapters on the indexer of sparse attention, which only selects keys: {some(sorted(index))}"
            )
            raise Unsupported(what, hint="leave it out of target_modules")
        # B is zero there, because no gradient reaches it.
        used.update(index)
    whole, names = _read_whole(keys, file, config, folder)
    used.update(names)
    if strange := sorted(set(file.names) - used):
        hint = nearest(strange[0], [name for site in sites(config) for name in site.names()])
        what = f"{plural(len(strange), 'tensor', 'belongs', 'belong')} to no module of this model: {', '.join(strange[:4])}"
        raise BadInput(what, where=str(folder), hint=hint)
    if not out:
        raise BadInput("the folder has no adapter", where=str(folder))
    return Contents(out, whole, float(keys.get("lora_dropout") or 0.0))


def _read_whole(
    keys: Mapping[str, Any], file: SafeTensors, config: Any, folder: Path
) -> tuple[dict[str, np.ndarray], set[str]]:
    """The weights of modules that were trained in full, by per-layer name, and their names in the file.

    Raises:
        BadInput: a part of a weight is missing or has another shape; or a head that the model ties to its embedding differs from it.
        Unsupported: one of an embedding and a head that the model ties.
    """
    table = KeyMap(*config.hub_rows())
    theirs = View(file, names={name.removeprefix(PREFIX): name for name in file.names if name.startswith(PREFIX)})
    for embedding, head in _tied(config):
        both = [name for name in (embedding, head) if name in theirs.names]
        if both == [head] or (both == [embedding] and not keys.get("ensure_weight_tying")):
            what = f"`{both[0]}` was trained in full, and the model ties `{embedding}` and `{head}`, so that PEFT unties them"
            raise Unsupported(what, where=str(folder), hint="untie the model first, or train again with ensure_weight_tying")
    found = table.ours_of(theirs.names)
    said = [name for name in keys.get("modules_to_save") or () if any(_ends(known, name) for known in table.names)]
    if absent := [name for name in said if not any(_ends(there, name) for there in found)]:
        raise BadInput(f"modules_to_save has {some(absent)}, and the file no such tensors", where=str(folder))
    whole = {path: np.asarray(table.read(theirs, path)) for path in dict.fromkeys(p for paths in found.values() for p in paths)}
    used = {PREFIX + name for name in found} | {PREFIX + head for _, head in _tied(config)}
    return whole, used & set(file.names)


def _ends(tensor: str, module: str) -> bool:
    """Whether a tensor belongs to a module of this name, which may lack its beginning, as PEFT matches them."""
    return f".{tensor.rpartition('.')[0]}".endswith(f".{module}")


def _tied(config: Any) -> Iterator[tuple[str, str]]:
    """The names of the embedding and of the head on the Hub, where one weight is both."""
    for row in config.hub_rows()[0]:
        if row.ours == "embed.w" and row.tied_to is not None:
            yield row.theirs, row.tied_to


def put_adapter(model: Any, adapters: Mapping[str, Adapter], dropout: float = 0.0) -> list[str]:
    """Puts adapters on the contractions of a model with unrolled layers. Returns the names of the contractions. The factors are arrays
    of the default device.

    dropout: that they were trained with, to be saved with them.
    """
    alike: dict[tuple[int, float, bool], list[str]] = {}
    for name, adapter in adapters.items():
        alike.setdefault((adapter.a.shape[-1], adapter.gain, adapter.m is not None), []).append(name)
    done = []
    for (rank, gain, dora), names in alike.items():
        kind = DoRA if dora else LoRA
        make = lambda of, k=kind, r=rank, g=gain: k(of, r, g * r, gain=g)  # noqa: E731
        done += swap(model, "|".join(map(re.escape, names)), make)
    for name in done:
        at(model, name).dropout = dropout
    # Arrays in host memory would be copied to the device in every step.
    leaves = {
        f"{name}.{factor}": jnp.asarray(np.ascontiguousarray(array, np.float32))
        for name in done
        for factor, array in adapters[name]._asdict().items()
        if factor != "gain" and array is not None
    }
    put(model, leaves)
    return done


def mark_whole(model: Any, whole: Iterable[str]) -> None:
    """Marks weights of a model with unrolled layers as trained in full beside its adapters, so that they are saved with them."""
    for name in whole:
        v = variable(model, name)
        put_at(model, name, Retrained(v.get_value(), **{key: v.get_metadata()[key] for key in ("meaning", "draw")}))


def settle(model: Any) -> None:
    """Computes what DoRA needs of the weights once, for a model that is not trained further."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, DoRA):
            module.settle()


def merged(weights: Reader, contents: Contents, config: Any) -> Reader:
    """A model's weights with adapters merged as they are read: W + gain A B, in the type of W; and with those that were trained in
    full in place of its own."""
    specs, adapters = contractions(config), contents.adapters
    weights = Over(weights, Arrays(contents.whole))

    def change(name: str, read: Callable[[], np.ndarray], part: int | None) -> np.ndarray:
        name = name.removesuffix(".w")
        if name not in adapters:
            return read()
        if part is None:
            return with_adapter(specs[name], adapters[name], read(), 0)
        return with_adapter(specs[name], adapters[name], read()[None], part)[0]

    return View(weights, change=change)


def with_adapter(of: Any, adapter: Adapter, weight: np.ndarray, first: int) -> np.ndarray:
    """A weight with its adapter merged; or entries of its first axis, starting at `first`."""
    outer = "".join(letter for letter in of.spec if letter not in of.inner + of.group)
    letters_a, letters_b, letters_m = f"{of.group}{of.inner}r", f"{of.group}r{outer}", of.kept
    out = np.empty_like(weight)
    rows = max(1, SLAB_BYTES * len(weight) // (4 * weight.size))
    slabs = [slice(low, min(low + rows, len(weight))) for low in range(0, len(weight), rows)]

    def own(array: np.ndarray, letters: str, here: slice) -> np.ndarray:
        """The part of a factor that belongs to a slab."""
        there = slice(first + here.start, first + here.stop)
        return array[tuple(there if letter == of.spec[0] else slice(None) for letter in letters)].astype(np.float32)

    def whole(here: slice) -> np.ndarray:
        a, b = own(adapter.a, letters_a, here), own(adapter.b, letters_b, here)
        delta = np.einsum(f"{letters_a},{letters_b}->{of.spec}", a, b, optimize=True)
        return weight[here].astype(np.float32) + np.float32(adapter.gain) * delta

    # A slab at a time: at once, it would need five arrays of the weight's size.
    if adapter.m is None:
        for here in slabs:
            out[here] = whole(here).astype(weight.dtype)
        return out
    inner = tuple(i for i, letter in enumerate(of.spec) if letter in of.inner)
    squares = [np.sum(np.square(whole(here)), inner) for here in slabs]
    if 0 in inner:
        squares = [sum(squares)] * len(slabs)
    for here, square in zip(slabs, squares):
        ratio = own(adapter.m, letters_m, here) / np.sqrt(square)
        out[here] = (whole(here) * np.expand_dims(ratio, inner)).astype(weight.dtype)
    return out


def _check(keys: Mapping[str, Any], folder: Path) -> None:
    if str(keys.get("peft_type", "LORA")).upper() != "LORA":
        raise Unsupported(f"adapters of type {keys['peft_type']} are not built", hint="only low-rank adapters (LORA) are")
    wrong = [f"{key} = {keys[key]!r}" for key, plain in PLAIN.items() if key in keys and keys[key] not in plain]
    if wrong:
        what = f"{', '.join(wrong)}: not built"
        raise Unsupported(what, where=str(folder / CONFIG), hint="merge the adapter with PEFT first")


def _check_tied(site: Site, config: Any) -> None:
    """PEFT adapts the embedding and leaves a tied head unchanged; here they are one weight, so this is refused."""
    if site.table and config.tied:
        what = f"an adapter on `{site.module}`, to which the head is tied: not built"
        raise Unsupported(what, hint="untie the head first, or leave the embedding out of the adapter")


def _gain(keys: Mapping[str, Any], module: str, rank: int, experts: int) -> float:
    """alpha / r, or alpha / sqrt(r) (arXiv:2312.03732). Patterns may give alpha by module and are matched as PEFT matches
    them."""
    alphas = {_alpha(keys, module.replace("{e}", str(e))) for e in range(experts)}
    if len(alphas) > 1:
        raise Unsupported(f"experts of `{module}` with different alphas: not built", hint="merge it with PEFT first")
    return alphas.pop() / (math.sqrt(rank) if keys.get("use_rslora") else rank) if rank else 0.0


def _alpha(keys: Mapping[str, Any], module: str) -> float:
    for pattern, value in (keys.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return float(value)
    return float(keys.get("lora_alpha", 8))


# ---------------------------------------------------------------- writing


def adapters_of(model: Any) -> dict[str, Adapter]:
    """The adapters on a model in either layout, by the per-layer name of their contraction.

    Raises:
        BadInput: the model has no adapters.
    """
    modules = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model) if isinstance(m, LoRA)}
    own = split(model)[1]
    layers: dict[str, dict[str, np.ndarray]] = {}
    of: dict[str, LoRA] = {}
    for layer, (address, i) in stored_addresses(model).items():
        stored, _, factor = address.rpartition(".")
        if stored in modules and factor in FACTORS:
            name = layer.rpartition(".")[0]
            layers.setdefault(name, {})[factor] = np.asarray(own[address] if i is None else own[address][i])
            of[name] = modules[stored]
    out = {}
    for name, factors in sorted(layers.items()):
        a, b, module = factors["a"], factors["b"], of[name]
        if "a0" in factors:
            # B has the rank behind its group.
            a, b = np.concatenate([a, factors["a0"]], -1), np.concatenate([b, -factors["b0"]], len(module.group))
        out[name] = Adapter(a, b, module.gain, factors.get("m"))
    if not out:
        raise BadInput(
            "the model has no adapters", hint="put some on it first: adapt.surgery.swap with adapt.lora.LoRA"
        )
    return out


def contents_of(model: Any) -> Contents:
    """What the PEFT folder of a model in either layout holds.

    Raises:
        BadInput: the model has no adapters.
    """
    own, mine = split(model)[1], retrained(model)
    places = {name: at for name, at in stored_addresses(model).items() if at[0] in mine}
    whole = {name: np.asarray(own[address] if i is None else own[address][i]) for name, (address, i) in places.items()}
    adapters = adapters_of(model)
    return Contents(adapters, whole, max(module.dropout for module in find(model, ".*", LoRA).values()))


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
        base: the name of the base model, for the config.
        whole: the weights of modules that were trained in full, by per-layer name.
        dropout: that the adapters were trained with.

    Raises:
        BadInput: the folder is not empty.
        Unsupported: an adapter on a weight for which PEFT has no name, or a part of a module of the Hub was trained in full.
    """
    folder = Path(folder)
    if taken(folder):
        raise BadInput(f"{folder} is not empty", hint="name a new folder; nothing is ever overwritten")
    theirs, modules = dict[str, np.ndarray](), dict[str, tuple[int, float]]()
    homes = {name: site for site in sites(config) for name in site.ours}
    if homeless := sorted(set(adapters) - set(homes)):
        raise Unsupported(f"PEFT has no name for adapters on {some(homeless)}", hint="merge them instead")
    sizes = config.hub_rows()[1]
    for site in dict.fromkeys(homes[name] for name in adapters):
        _check_tied(site, config)
        parts = [adapters.get(name) for name in site.ours]
        for name, array, rank, gain in _theirs(site, parts, sizes):
            theirs[name] = array
            modules[re.sub(r"\.lora_.*", "", name.removeprefix(PREFIX))] = (rank, gain)
    in_full = _whole_theirs(config, whole)
    theirs |= {PREFIX + name: array for name, array in in_full.items()}
    magnitudes = {adapter.m is not None for adapter in adapters.values()}
    if len(magnitudes) > 1:
        raise Unsupported("DoRA on some weights and LoRA on others: PEFT has one of them", hint="merge them instead")
    entries = [
        Entry(name, array.shape, array.dtype, lambda array=array: array) for name, array in sorted(theirs.items())
    ]
    files = [tensors_file(WEIGHTS, entries, {"format": "pt"})]
    said = _config(modules, base, magnitudes.pop()) | {"lora_dropout": dropout}
    said |= {"modules_to_save": sorted({name.rpartition(".")[0] for name in in_full}) or None}
    said |= {"task_type": SCORES} if config.scored else {}
    files.append(of_text(CONFIG, json.dumps(said, indent=2) + "\n"))
    # The folder is written completely or not at all.
    with Partial(folder, None) as part:
        part.plan(files)
        part.write(files)
        part.commit()


def _whole_theirs(config: Any, whole: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights of modules that were trained in full, by their name on the Hub. A head that is tied is written too, because PEFT
    copies the embedding and not what is tied to it."""
    rows, sizes = config.hub_rows()
    mine = [_at(row, layer) for row in rows for layer in (None,) if row.over is None]
    mine += [_at(row, layer) for row in rows for layer in row.over or ()]
    mine = [row for row in mine if any(path in whole for path in _paths(row))]
    for row in mine:
        if lost := [path for path in _paths(row) if path not in whole]:
            what = f"`{row.theirs}` is one weight for the PEFT library, of which {some(lost)} was not trained in full"
            raise Unsupported(what, hint="adapter.train=... for all of them, or merge instead")
    out = {}
    for entry in KeyMap(mine, sizes).inverse(Arrays(whole)):
        out[entry.name] = np.ascontiguousarray(entry.make(), np.float32)
    return out | {head: out[embedding] for embedding, head in _tied(config) if embedding in out}


def _paths(row: Row) -> tuple[str, ...]:
    return (row.ours,) if isinstance(row.ours, str) else row.ours


def _at(row: Row, layer: int | None) -> Row:
    """A row at one layer."""

    def filled(names: Any) -> Any:
        one = isinstance(names, str)
        return names.replace("{l}", str(layer)) if one else tuple(name.replace("{l}", str(layer)) for name in names)

    # The library's model has no modules that predict further tokens, which hold copies.
    return replace(row, theirs=filled(row.theirs), ours=filled(row.ours), over=None, copies=())


def _theirs(
    site: Site, parts: Sequence[Adapter | None], sizes: Mapping[str, int]
) -> Iterator[tuple[str, np.ndarray, int, float]]:
    """A and B of one site, with rank and gain."""
    present = [part for part in parts if part is not None]
    dora = [part.m is not None for part in present]
    if any(dora) and not (all(dora) and len(present) == len(parts)):
        what = f"DoRA on a part of `{site.module}`, which is one matrix for the PEFT library"
        raise Unsupported(what, hint=f"adapt all of {', '.join(site.ours)}, or merge instead")
    shared = len(present) == len(parts) and all(
        part.gain == present[0].gain and np.array_equal(part.a, present[0].a) for part in present
    )
    if shared:
        a, bs, gain = present[0].a, [part.b for part in present], present[0].gain
    # Different A: the ranks are concatenated, and each part of B is nonzero only at its own.
    else:
        gain = 1.0
        a = np.concatenate([part.a for part in present], -1)
        axis = 1 if "{e}" in site.module else 0
        bs, start = [], 0
        for i, part in enumerate(parts):
            shape = list(part.b.shape if part else How.parse(site.how_b).ours[i].shape(dict(sizes) | {"r": 0}))
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
    ours = {f"{site.ours[0]}.a": a} | {f"{name}.b": b for name, b in zip(site.ours, bs)}
    ours |= {f"{name}.m": part.m for name, part in zip(site.ours, parts) if part is not None and part.m is not None}
    for entry in table.inverse(Arrays({name: np.asarray(array, np.float32) for name, array in ours.items()})):
        yield entry.name, np.ascontiguousarray(entry.make()), rank, gain


def _config(modules: Mapping[str, tuple[int, float]], base: str | None, dora: bool) -> dict[str, Any]:
    ranks = [rank for rank, _ in modules.values()]
    rank = max(set(ranks), key=ranks.count)
    alphas = {module: gain * r for module, (r, gain) in modules.items()}
    alpha = max(set(alphas.values()), key=list(alphas.values()).count)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
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
