"""Derives which modules of a Hub model a PEFT adapter may be on, and the names and layouts of its factors.

Names follow from the family's Hub table. A row of the table says how a weight is read. The two factors of the weight's adapter are
read the same way: A has the axes that the weight sums over, B the others.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight [r in]     layers.3.attn.q.a [D r]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight [out r]    layers.3.attn.q.b [r N H]

Where the Hub fuses weights that are separate here (Phi's qkv_proj), all of them share A. DoRA's magnitudes (`use_dora`) are read like
a bias.
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
# PEFT inserts this into the name of a base weight that has an adapter.
UNDER = "base_layer."
# PEFT's task type for models with a head of scores.
SCORES = "SEQ_CLS"


class Adapter(NamedTuple):
    """The factors of the adapter of one contraction. Their axes are those of `adapt.lora`.

    a, b: the factors. Their product times `gain` is added to the weight.
    m: DoRA's magnitude of each output channel, None for other adapters.
    """

    a: np.ndarray
    b: np.ndarray
    gain: float
    m: np.ndarray | None = None


class PeftContents(NamedTuple):
    """The contents of a PEFT folder.

    adapters: the adapters, by the per-layer name of their contraction.
    whole: the weights of modules that were trained in full, by per-layer name.
    dropout: the dropout rate that the adapters were trained with.
    base: weights of the base that PEFT saved beside adapters on an embedding or a head, by per-layer name. `reader.check_base` compares
        them with the base model.
    """

    adapters: Mapping[str, Adapter]
    whole: Mapping[str, np.ndarray] = MappingProxyType({})
    dropout: float = 0.0
    base: Mapping[str, np.ndarray] = MappingProxyType({})


@dataclass(frozen=True)
class Site:
    """A module of a Hub model that may carry an adapter, the contractions of ours that it holds, and the equations that map its
    factors (A, B and DoRA's magnitudes) to ours."""

    # Contains {e} if there is one module per expert.
    module: str
    weights: tuple[str, ...]
    how_a: str
    how_b: str
    how_m: str
    # An embedding: PEFT uses other names for its factors.
    table: bool

    def names(self) -> tuple[str, str]:
        """Returns the names of A and B on the Hub."""
        kind = ("lora_embedding_A", "lora_embedding_B") if self.table else ("lora_A.weight", "lora_B.weight")
        return f"{PREFIX}{self.module}.{kind[0]}", f"{PREFIX}{self.module}.{kind[1]}"

    def magnitude(self) -> str:
        """Returns the name of DoRA's magnitudes on the Hub."""
        return f"{PREFIX}{self.module}.lora_magnitude_vector"

    def rows(self, part: int, dora: bool = False) -> list[KeyRow]:
        """Returns the rows of A and B, and with `dora` of the magnitudes, for contraction number `part` of the module."""
        a, b = self.names()
        rows = [
            KeyRow(a, f"{self.weights[part]}.a", self.how_a),
            KeyRow(b, tuple(f"{name}.b" for name in self.weights), self.how_b),
        ]
        return [*rows, KeyRow(self.magnitude(), tuple(f"{name}.m" for name in self.weights), self.how_m)] if dora else rows


def sites(config: Any) -> list[Site]:
    """Returns every module of the Hub model that may carry a low-rank adapter."""
    out = []
    for module, names, row, weights in modules_of(config):
        if not weights[0].chooses and (hows := _readings(row.reading, weights)) is not None:
            out.append(Site(module, names, *hows, table=weights[0].is_lookup))
    return out


def modules_of(config: Any) -> Iterator[tuple[str, tuple[str, ...], KeyRow, list[Contraction]]]:
    """Yields (Hub name, our names, row of the Hub table, contractions) for the Hub modules that hold weights of our contractions.
    Convolutions are not among them."""
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
    """Returns the contractions of a model by per-layer name."""
    modules = nnx.iter_modules(config.build(Unroll()))
    return {".".join(map(str, path)): m for path, m in modules if isinstance(m, Contraction)}


def _readings(reading: str, weights: Sequence[Contraction]) -> tuple[str, str, str] | None:
    """Derives the equations of A, B and the magnitudes from that of the weights. None if the Hub's weight is not a matrix of inputs and
    outputs."""
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
    """Splits one side of an equation into the axes of a tensor: `((N|K|K) H) D` has two."""
    out, depth = [""], 0
    for char in side.strip():
        depth += (char == "(") - (char == ")")
        if char == " " and depth == 0:
            out.append("")
        else:
            out[-1] += char
    return [axis for axis in out if axis]


def tied_names(config: Any) -> Iterator[tuple[str, str]]:
    """Yields the Hub names of the embedding and of the head that is tied to it; nothing for models that are not tied."""
    for row in config.hub_rows()[0]:
        if row.paths == "embed.w" and row.tied_to is not None:
            yield row.names, row.tied_to


def check_tied_adapter(site: Site, config: Any) -> None:
    """Refuses an adapter on an embedding with a tied head. PEFT would leave the head unchanged, but here the two are one weight."""
    if site.table and config.tied:
        problem = f"an adapter on `{site.module}`, to which the head is tied: not built"
        raise Unsupported(problem, hint="untie the head first, or leave the embedding out of the adapter")
