"""Reads the weights of a quantized Hub folder as `QuantizedWeights`: the stored codes, not rounded again, in the axes of our models.

A weight keeps its codes if a `Scheme` can describe its blocks in our axes, so that each of these blocks has one scale. Other weights
are read as floats: columns in the order of activations (GPTQ), tensors that are fused across blocks, and weights whose parts have
different second-level scales.
"""

import re
from collections.abc import Callable, KeysView, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.adapt.quant import PARTS, QuantizedEinsum, Scheme
from argosy.adapt.surgery import find
from argosy.core.counts import plural
from argosy.core.formats import Shape, TensorReader
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import variables
from argosy.ops.quantized import packed_codes
from argosy.weights.hub.quantized.module import PackedModule
from argosy.weights.quantized import QuantizedWeights, quantized_model

# Maps a part of packed weights (`reader.Part`) to a reader by our per-layer names, which gives this part in place of packed weights.
PartReader = Callable[[Any], Any]


def quantized_weights(
    config: Any,
    read: PartReader,
    sources: Mapping[str, Sequence[PackedModule | None]],
    tensors: TensorReader,
    warn: Callable[[str], None],
) -> QuantizedWeights | None:
    """Returns a folder's weights, of which quantized ones keep their codes where possible; None if no weight keeps them.

    Args:
        sources: the modules that each weight is made from, by per-layer name, in the order of its row in the Hub table. None stands
            for a tensor that is not packed.
        tensors: the tensors of the folder under their own names.
        warn: called with a sentence about packed weights that are read as floats.
    """
    schemes, floats, cache, blocks = {}, list[str](), dict[Any, Any](), read("blocks")
    for name, of in find(config.build(Unroll()), ".*").items():
        modules = sources.get(f"{name}.w", ())
        if all(module is None for module in modules):
            continue
        scheme = None
        if not any(module is None for module in modules):
            scheme = _scheme(name, of, [module for module in modules if module is not None], blocks, tensors, cache)
        if scheme is None:
            floats.append(name)
        else:
            schemes[name] = scheme
    if floats:
        are = "has scales" if len(floats) == 1 else "have scales"
        why = "that are not those of blocks here: computed as floats"
        warn(f"{plural(len(floats), 'packed weight')} {are} {why}, such as {floats[0]}")
    if not schemes:
        return None
    return QuantizedWeights(schemes, PackedArrays(config, schemes, read))


def _scheme(
    name: str, of: Contraction, modules: list[PackedModule], blocks: Any, tensors: TensorReader, cache: dict[Any, Any]
) -> Scheme | None:
    """Returns the scheme of a weight that is made from these modules; None if no scheme describes it."""
    kinds = {(m.format, m.minima, m.activations, m.activation_block, m.activations_scale) for m in modules}
    if len(kinds) > 1 or (modules[0].is_two_level and not _are_equal_outer(of, modules, tensors)):
        return None
    format, minima, activations, activation_block, activations_scale = kinds.pop()
    kind = (re.sub(r"\d+", "", name), tuple(sorted({(m.format, m.shape, m.block) for m in modules})), len(modules))
    if all(m.columns is None for m in modules) and kind in cache:
        granularity = cache[kind]
    else:
        granularity = cache[kind] = _granularity(f"{name}.w", of, modules[0], blocks)
        if any(m.columns is not None for m in modules):
            del cache[kind]
    if granularity is None:
        return None
    calibration = "minmax" if minima else "absmax"
    return Scheme(format, granularity, calibration, activations, activation_block, activations_scale)


def _are_equal_outer(of: Contraction, modules: list[PackedModule], tensors: TensorReader) -> bool:
    """Whether a weight has a single second-level scale, or a weight with experts one for each expert."""
    numbers = np.concatenate([module.outer(tensors) for module in modules])
    experts = of.sizes[of.group] if of.group else 1
    return len(numbers) % experts == 0 and bool((numbers.reshape(-1, experts) == numbers[:experts]).all())


def _granularity(path: str, of: Contraction, module: PackedModule, blocks: Any) -> str | int | None:
    """Returns the widest granularity whose blocks, in our axes, lie within the blocks of the module; None if there is none."""
    # Experts are packed alike.
    is_apart = blocks.is_apart(path)
    numbers = blocks.read_part(path, 0) if is_apart else blocks.read(path)
    for granularity in _granularities(module):
        block = Scheme(module.format, granularity).block(of)[int(is_apart) :]
        if all(size % each == 0 for size, each in zip(numbers.shape, block, strict=True)):
            tiles = numbers.reshape([n for size, each in zip(numbers.shape, block, strict=True) for n in (size // each, each)])
            axes = tuple(range(1, tiles.ndim, 2))
            if (tiles.max(axes) == tiles.min(axes)).all():
                return granularity
    return None


def _granularities(module: PackedModule) -> list[str | int]:
    """Returns the granularities that may describe the blocks of a module, the widest first."""
    rows, columns = module.block
    if module.block == module.shape:
        return ["tensor", "channel"]
    if rows == 1:
        # Smaller groups are needed where one of our axes ends within a block.
        smaller = [n for n in (columns >> i for i in range(4)) if n >= 8 or n == columns]
        return ["channel", *smaller] if columns == module.shape[-1] else list(smaller)
    return [f"{columns >> i}x{rows >> i}" for i in range(4) if min(columns, rows) >> i >= 16]


class PackedArrays:
    """A `TensorReader` of the arrays of the quantized model, with the codes of the folder. `RoundedTensors` is its counterpart for
    weights that are rounded here."""

    def __init__(self, config: Any, schemes: Mapping[str, Scheme], read: PartReader):
        model = quantized_model(config, schemes)
        self.contractions: dict[str, QuantizedEinsum] = {
            name: of for name, of in find(model, ".*").items() if name in schemes and isinstance(of, QuantizedEinsum)
        }
        self._parts = {part: read(part) for part in ("floats", "values", "scale", "minimum", "outer", "x_scale")}
        model_weights = variables(model)
        self._shapes: dict[str, Any] = {}
        for name in self._parts["floats"].names:
            module = name.removesuffix(".w")
            quantized = module in self.contractions and name.endswith(".w")
            names = [f"{module}.{part}" for part in PARTS] if quantized else [name]
            self._shapes |= {each: model_weights[each] for each in names if each in model_weights}

    @property
    def names(self) -> KeysView[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> Shape:
        return tuple(self._shapes[name].shape)

    def dtype(self, name: str) -> np.dtype:
        module, _, part = name.rpartition(".")
        is_code = module in self.contractions and part in PARTS
        return np.dtype(self._shapes[name].dtype) if is_code else self._parts["floats"].dtype(name)

    def read(self, name: str) -> np.ndarray:
        module, _, part = name.rpartition(".")
        if module not in self.contractions or part not in PARTS:
            return self._parts["floats"].read(name)
        of, whole = self.contractions[module], self._parts[part].read(f"{module}.w")
        if part == "values":
            return np.asarray(packed_codes(jnp.asarray(whole), of.packed, of.bits)) if of.packed else np.ascontiguousarray(whole)
        if part == "x_scale":
            # Experts have one scale of data for all of them, which is wide enough for each.
            return np.asarray(whole.max(), np.float32)
        # The first of each block.
        first = tuple(slice(None, None, size // count) for size, count in zip(whole.shape, self.shape(name), strict=True))
        return np.ascontiguousarray(whole[first]).astype(self.dtype(name), copy=False)

