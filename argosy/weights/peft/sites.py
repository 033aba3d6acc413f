"""The modules of a Hub's model that a low-rank adapter of the PEFT library fits, and the names and layouts of its factors.

Names follow from the family's Hub table. A row of it says how a weight is read, and the two factors of the weight's adapter are
read the same way: A has the axes that the weight sums over, B the others.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight [r in]     layers.3.attn.q.a [D r]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight [out r]    layers.3.attn.q.b [r N H]

Where the Hub fuses weights that are separate here (Phi's qkv_proj), all of them share A. DoRA's magnitudes (`use_dora`) are read as a
bias is.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from argosy.core.errors import Unsupported
from argosy.core.keymap import KeyRow
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Unroll

FILES = CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# What PEFT puts into the name of a weight of the base that has an adapter.
UNDER = "base_layer."
# PEFT's task type of models with a head of scores.
SCORES = "SEQ_CLS"


class Adapter(NamedTuple):
    """The factors of one contraction, in the letters of `adapt.lora`.

    gain: that of their product.
    m: DoRA's magnitude of each output channel.
    """

    a: np.ndarray
    b: np.ndarray
    gain: float
    m: np.ndarray | None = None


class PeftContents(NamedTuple):
    """What a PEFT folder holds.

    adapters: by the per-layer name of their contraction.
    whole: the weights of modules that were trained in full, by per-layer name.
    dropout: the rate that the adapters were trained with.
    base: weights of the base that PEFT saved beside adapters on an embedding or a head, by per-layer name; `reader.check_base`
        compares them with the base's.
    """

    adapters: Mapping[str, Adapter]
    whole: Mapping[str, np.ndarray] = MappingProxyType({})
    dropout: float = 0.0
    base: Mapping[str, np.ndarray] = MappingProxyType({})


@dataclass(frozen=True)
class Site:
    """A module on the Hub that may carry an adapter, the contractions of ours it covers, and how its factors are read."""

    # Contains {e} if there is one module per expert.
    module: str
    weights: tuple[str, ...]
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

    def rows(self, part: int, dora: bool = False) -> list[KeyRow]:
        """The rows of A and B, and of DoRA's magnitudes, for contraction number `part` of the module."""
        a, b = self.names()
        rows = [
            KeyRow(a, f"{self.weights[part]}.a", self.how_a),
            KeyRow(b, tuple(f"{name}.b" for name in self.weights), self.how_b),
        ]
        return [*rows, KeyRow(self.magnitude(), tuple(f"{name}.m" for name in self.weights), self.how_m)] if dora else rows


def sites(config: Any) -> list[Site]:
    """Every module of the Hub's model that a low-rank adapter fits."""
    out = []
    for module, names, row, weights in modules_of(config):
        if not weights[0].chooses and (hows := _readings(row.reading, weights)) is not None:
            out.append(Site(module, names, *hows, table=weights[0].is_lookup))
    return out


def modules_of(config: Any) -> Iterator[tuple[str, tuple[str, ...], KeyRow, list[Contraction]]]:
    """The Hub's modules that hold the weights of our contractions: their names, how they are read, and the contractions. Convolutions
    are not among them."""
    specs = contractions(config)
    for row in config.hub_rows()[0]:
        ours = (row.paths,) if isinstance(row.paths, str) else row.paths
        if not isinstance(row.names, str) or not all(path.endswith(".w") for path in ours):
            continue
        for layer in (None,) if row.layers is None else row.layers:
            names = tuple(path.removesuffix(".w").replace("{l}", str(layer)) for path in ours)
            if not all(name in specs for name in names):
                continue
            yield (
                row.names.removesuffix(".weight").replace("{l}", str(layer)),
                names,
                row,
                [specs[name] for name in names],
            )


def contractions(config: Any) -> dict[str, Contraction]:
    """The contractions of a model by per-layer name."""
    modules = nnx.iter_modules(config.build(Unroll()))
    return {".".join(map(str, path)): m for path, m in modules if isinstance(m, Contraction)}


def _readings(reading: str, weights: Sequence[Contraction]) -> tuple[str, str, str] | None:
    """How A, B and the magnitudes are read, derived from how the weights are read; None if the Hub's weight is not a matrix of
    inputs and outputs."""
    weight = weights[0]
    left, right = reading.split("->")
    theirs, parts = _axes(left), [_axes(part) for part in right.split(",")]
    summed = [axis for axis, letter in zip(parts[0], weight.spec) if letter in weight.inner]
    group = [axis for axis, letter in zip(parts[0], weight.spec) if letter in weight.group]
    names = {name for axis in summed for name in re.findall(r"\w+", axis)}
    side = [set(re.findall(r"\w+", axis)) == names for axis in theirs]
    if len(theirs) != 2 or sum(side) != 1:
        return None
    inputs, outputs = theirs[side.index(True)], theirs[side.index(False)]
    out_axes = [[a for a, x in zip(part, w.spec) if x in w.out and x not in w.inner] for part, w in zip(parts, weights)]
    how_a = f"r {inputs} -> {' '.join([*group, *summed, 'r'])}"
    how_b = f"{outputs} r -> {', '.join(' '.join([*group, 'r', *axes]) for axes in out_axes)}"
    how_m = f"{outputs} -> {', '.join(' '.join([*group, *axes]) for axes in out_axes)}"
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


def tied_names(config: Any) -> Iterator[tuple[str, str]]:
    """The names of the embedding and of the head on the Hub, where one weight is both."""
    for row in config.hub_rows()[0]:
        if row.paths == "embed.w" and row.tied_to is not None:
            yield row.names, row.tied_to


def check_tied_adapter(site: Site, config: Any) -> None:
    """PEFT adapts the embedding and leaves a tied head unchanged; here they are one weight, so this is refused."""
    if site.table and config.tied:
        problem = f"an adapter on `{site.module}`, to which the head is tied: not built"
        raise Unsupported(problem, hint="untie the head first, or leave the embedding out of the adapter")
