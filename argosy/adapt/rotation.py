"""Rotates a model's residual stream and its value heads, so that no channel has outliers and quantization loses less. The model
computes the same function (Ashkboos et al. 2024, QuaRot, arXiv:2404.00456; Liu et al. 2024, SpinQuant, arXiv:2405.16406).

    x' = x R          RMSNorm(x R) = RMSNorm(x) R, if the norm has no weight
    reads x:   y = RMSNorm(x) g W    becomes    y = RMSNorm(x') (R' g W)
    writes x:  x + y W               becomes    x' + y (W R)
    values:    v' = v Q, and W_o takes Q' v, in each head
    online:    down reads h H, and becomes H' W_down; W_o takes H' a across heads; queries and keys are q H and k H

First, the weights of norms are folded into the matrices that read the norms. A tied head gets weights of its own, because the final
norm is folded only into the head. R and Q are Hadamard matrices with random signs from a fixed seed (`adapt.hadamard`).
`rotate=hadamard` changes only weights. `rotate=quarot` also adds rotations after nonlinearities, which the model computes while it
runs. They become the setting `rotations` of its config (`models.parts.rotations`).

Differences from the papers: no rotation is learned, and sizes without a Hadamard matrix are supported (`ops.hadamard`).

Weights are rotated one by one, when they are read. A block must read the stream only through RMSNorm. A norm with a mean, a norm of the
output of a sublayer, and a norm after the addition are errors that name the norm.
"""

from collections import Counter
from collections.abc import KeysView
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from argosy.adapt.hadamard import hadamard_rotation
from argosy.core.counts import plural
from argosy.core.errors import Unsupported
from argosy.core.formats import Shape, TensorReader
from argosy.models.parts.attention.heads import Attention
from argosy.models.parts.block import Block
from argosy.models.parts.decoder import Decoder
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.mlp import GLU, MLP
from argosy.models.parts.moe import MoE
from argosy.models.parts.norm import RMSNorm
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import variables
from argosy.models.settings import Rotation
from argosy.ops.hadamard import hadamard_transform, is_hadamard_size

# The seed of the random signs. A model is always rotated in the same way.
SEED = 0
STREAM = "embed"
HEAD, EMBED = "head.w", "embed.w"


class AxisRotation(NamedTuple):
    """The rotation of one axis of a weight.

    axis: the index of the axis.
    kind: `stream` for the residual stream, `values` for the features of a value head, `online` for activations that are rotated while
        the model runs.
    norm: the name of the norm whose weight is folded into the weight, or "".
    """

    axis: int
    kind: Literal["stream", "values", "online"] = "stream"
    norm: str = ""


class RotationPlan(NamedTuple):
    """The rotations of a model's weights, by per-layer name.

    turns: the rotations of each weight that changes.
    norms: the offset of each norm that is folded, which is the number that the norm adds to its weight.
    """

    turns: dict[str, list[AxisRotation]]
    norms: dict[str, float]


class RotatedTensors:
    """A `TensorReader` of the weights of a rotated model.

    Args:
        config: the config of the stored model.
        weights: reads the weights of the stored model, by per-layer name.
        online: the rotations of activations that the model will compute while it runs. Weights are rotated to match.

    Raises:
        Unsupported: the structure of the model does not allow rotations, or the model already has some.
    """

    def __init__(self, config: Any, weights: TensorReader, online: tuple[Rotation, ...] = ()):
        self.weights, self.plan, self.online = weights, rotation_plan(config, online), online
        self.unties = bool(config.tied)
        width = config.dims["D"]
        self.stream, self.is_hadamard = hadamard_rotation(width, SEED)
        self.heads = hadamard_rotation(config.dims["H"], SEED + 1)[0] if "H" in config.dims else None
        rotations = config.rotations + online
        self.config = config.model_copy(update={"rotations": rotations} | ({"tied": False} if self.unties else {}))
        names = [*weights.names, *([HEAD] if self.unties else [])]
        self._names = dict.fromkeys(names)

    @property
    def names(self) -> KeysView[str]:
        return self._names.keys()

    def shape(self, name: str) -> Shape:
        return self.weights.shape(EMBED)[::-1] if self._is_untied(name) else self.weights.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return self.weights.dtype(EMBED if self._is_untied(name) else name)

    def _is_untied(self, name: str) -> bool:
        return self.unties and name == HEAD

    def read(self, name: str) -> np.ndarray:
        if (offset := self.plan.norms.get(name)) is not None:
            return np.full(self.shape(name), 1 - offset, self.dtype(name))
        turns = self.plan.turns.get(name)
        if turns is None:
            return self.weights.read(name)
        w = self.weights.read(EMBED).T if self._is_untied(name) else self.weights.read(name)
        w = np.asarray(w, np.float32)
        for turn in turns:
            w = np.moveaxis(w, turn.axis, -1)
            if turn.norm:
                w = w * (np.asarray(self.weights.read(turn.norm), np.float32) + self.plan.norms[turn.norm])
            w = np.moveaxis(self._turned(w, turn.kind), -1, turn.axis)
        return np.ascontiguousarray(w).astype(self.dtype(name))

    def _turned(self, w: np.ndarray, kind: str) -> np.ndarray:
        """Rotates the last axis of a weight."""
        if kind == "online":
            return np.asarray(hadamard_transform(jnp.asarray(w)))
        matrix = self.heads if kind == "values" else self.stream
        assert matrix is not None
        return w @ matrix.astype(np.float32)


def rotated_model(stored: Any, online: tuple[Rotation, ...] = ()) -> Any:
    """Returns an opened model (`weights.model.OpenedModel`) whose weights are rotated when they are read.

    Args:
        online: the rotations that the model will compute while it runs, as in `RotatedTensors`.

    Raises:
        Unsupported: the structure of the model does not allow rotations, or the model has adapters.
    """
    if stored.adapted is not None:
        raise Unsupported(f"{stored.path} has adapters, which read the stream as it was", hint="merge them first: argosy convert")
    if stored.companions is not None and (stored.companions / "modules.json").is_file():
        raise _unsupported("it embeds texts, and its vectors would be rotated")
    weights = RotatedTensors(stored.config, stored.weights, online)
    return replace(stored, config=weights.config, weights=weights, blocks=None)


def describe_rotation(weights: RotatedTensors) -> str:
    """Returns a sentence about the rotation for the user."""
    kind = "a Hadamard matrix"
    if not weights.is_hadamard:
        kind = "an orthogonal matrix that is random in its odd part, because no Hadamard matrix of this size is known here"
    untied = "; the tied head gets weights of its own, because the final norm is folded into it" if weights.unties else ""
    return f"the stream of {len(weights.stream)} channels is rotated by {kind}{untied}{_described_online(weights)}"


def _described_online(weights: RotatedTensors) -> str:
    """Returns the end of that sentence, about the activations that are rotated while the model runs."""
    if not weights.online:
        return ""
    counts = Counter(name.rpartition(".attn.o.w")[1] or "mlp" for name, turns in weights.plan.turns.items() if _is_online(turns))
    rotations = [f"the inputs of {plural(counts['mlp'], 'down projection')}"] if counts["mlp"] else []
    if counts[".attn.o.w"]:
        rotations.append(f"queries, keys and heads of {plural(counts['.attn.o.w'], 'layer')}")
    sizes = {weights.shape(name)[turn.axis] for name, turns in weights.plan.turns.items() for turn in turns if turn.kind == "online"}
    odd = sorted(size for size in sizes if not is_hadamard_size(size))
    hartley = f" ({' and '.join(map(str, odd))} by a Hartley transform in part)" if odd else ""
    return f"; {' and '.join(rotations)} are rotated while the model runs{hartley}"


def _is_online(turns: list[AxisRotation]) -> bool:
    return any(turn.kind == "online" for turn in turns)


def rotation_plan(config: Any, online: tuple[Rotation, ...] = ()) -> RotationPlan:
    """Returns the rotations of a model's weights.

    Args:
        online: the rotations that the model will compute while it runs, as in `RotatedTensors`.

    Raises:
        Unsupported: the structure of the model does not allow rotations, or the model already has some. The message gives the reason.
    """
    if online and config.rotations:
        raise _unsupported(f"its data is rotated already (rotations = {', '.join(config.rotations)})")
    if getattr(config, "scored", False):
        raise _unsupported("its head scores texts")
    model = config.build(Unroll())
    norms = _norms(model)
    turns: dict[str, list[AxisRotation]] = {}
    for path, of in nnx.iter_modules(model):
        name = ".".join(map(str, path))
        if not isinstance(of, Contraction) or STREAM not in of.axes:
            continue
        reads = STREAM in of.summed_axes
        norm = _norm_of(name) if reads else ""
        turns[f"{name}.w"] = [AxisRotation(of.axes.index(STREAM), norm=norm)]
        bias = getattr(of, "b", None)
        if bias is not None and STREAM in (axes := bias.get_metadata()["meaning"].axes):
            turns[f"{name}.b"] = [AxisRotation(axes.index(STREAM))]
    if model.head is None:
        turns[HEAD] = [AxisRotation(0, norm="norm.scale")]
    for i in range(len(model.layers.plan)):
        attention = getattr(model.layers, str(i)).attn
        if type(attention) is Attention:
            # Attention sums values of the same head with scalar weights, so a rotation within a head passes through.
            for part, letters in (("v.w", "DKH"), ("v.b", "KH"), ("o.w", "NHD")):
                name = f"layers.{i}.attn.{part}"
                if part != "v.b" or attention.v.b is not None:
                    turns.setdefault(name, []).append(AxisRotation(letters.index("H"), "values"))
            if "heads" in online:
                turns[f"layers.{i}.attn.o.w"].append(AxisRotation(0, "online"))
    if "ffn" in online:
        for path, of in nnx.iter_modules(model):
            if isinstance(of, GLU | MLP | MoE):
                name = ".".join(map(str, (*path, "down.w")))
                turns[name].append(AxisRotation(of.down.spec.index(of.down.inner), "online"))
    changed = {*turns, *norms}
    rest = [a for a, v in variables(model).items() if STREAM in v.get_metadata()["meaning"].axes and a not in changed]
    if rest:
        raise _unsupported(f"`{rest[0]}` acts on single channels of the stream")
    return RotationPlan(turns, norms)


def _norm_of(name: str) -> str:
    """Returns the name of the norm through which a contraction reads the stream."""
    parts = name.split(".")
    return f"layers.{parts[1]}.{parts[2]}_norm.scale" if parts[0] == "layers" else "norm.scale"


def _norms(model: Any) -> dict[str, float]:
    """Returns the offset of each norm that reads the stream, by the name of its weight."""
    if not isinstance(model, Decoder) or getattr(model, "mtp", None) is not None:
        raise _unsupported(f"it is a {type(model).__name__}, not tokens, layers and a head")
    out: dict[str, Any] = {"norm": model.norm}
    for i in range(len(model.layers.plan)):
        block = getattr(model.layers, str(i))
        if type(block) is not Block:
            raise _unsupported(f"layer {i} is a {type(block).__name__}")
        if block.norm_after:
            raise _unsupported(f"layer {i} has norms after its additions")
        for part in ("attn", "mlp"):
            if getattr(block, part) is None:
                continue
            if getattr(block, f"post_{part}_norm") is not None:
                raise _unsupported(f"`layers.{i}.post_{part}_norm` norms what is added to the stream")
            if getattr(block, f"{part}_norm") is None:
                raise _unsupported(f"layer {i} reads the stream without a norm")
            out[f"layers.{i}.{part}_norm"] = getattr(block, f"{part}_norm")
    wrong = next((name for name, norm in out.items() if not isinstance(norm, RMSNorm)), None)
    if wrong is not None:
        raise _unsupported(f"`{wrong}` is a {type(out[wrong]).__name__}, which subtracts a mean or does more than RMSNorm")
    return {f"{name}.scale": norm.offset for name, norm in out.items()}


def _unsupported(reason: str) -> Unsupported:
    return Unsupported(f"rotate: {reason}", hint="leave out `rotate`: other methods need no such structure")
