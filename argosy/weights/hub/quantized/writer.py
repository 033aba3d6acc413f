"""Writes a quantized model as a Hub folder in the layouts of compressed-tensors 0.20, which transformers and vLLM read.

    int8 with activations in int8               int-quantized
    int4, and int8 with float activations       pack-quantized, which vLLM has kernels for
    fp8 per tensor, channel or tile             float-quantized
    NVFP4, MXFP4                                nvfp4-pack-quantized, mxfp4-pack-quantized

A static scale of activations is written as `input_scale`, one number for a module. The family's `KeyMap` moves codes and scales to the
Hub's axes, as it moves floats. A scheme that no layout can express is an error before anything is written.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from argosy.adapt.quant import QuantizedEinsum, Scheme
from argosy.adapt.surgery import find
from argosy.core.errors import Unsupported
from argosy.core.formats import Shape, TensorEntry, TensorReader
from argosy.core.formats.files import File
from argosy.core.formats.safetensors import folder_files
from argosy.core.keymap import KeyMap
from argosy.models.base.language import LanguageConfig
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import variables
from argosy.ops.quantized import spread, unpack_codes
from argosy.weights.hub.quantized.module import INTEGERS, packed_words
from argosy.weights.hub.writer import cast_weights, hub_config_file
from argosy.weights.quantized import quantized_model

BITS = {format: bits for bits, format in INTEGERS.items() if bits != 2}
FP4_COLUMNS = {"nvfp4": 16, "mxfp4": 32}
# The bits and the type of activations, by (format of weights, format of activations).
PRODUCTS = {
    ("int8", "int8"): (8, "int"),
    ("int4", "int8"): (8, "int"),
    ("fp8_e4m3", "fp8_e4m3"): (8, "float"),
    ("mxfp4", "mxfp4"): (4, "float"),
}
# A placeholder for the type of packed tensors, which are not written in their own type.
PACKED = np.dtype(bool)
WAY_OUT = "to=argosy takes every format; or rules that leave the weight as it is"


@dataclass(frozen=True)
class WrittenModule:
    """How a module is written.

    layout: the layout of compressed-tensors.
    block: the numbers of rows and of columns that share a scale.
    weights, data: the `weights` and `input_activations` of its config group, as JSON. `data` is None where activations are floats.
    """

    layout: str
    block: tuple[int, int]
    weights: dict[str, Any]
    data: dict[str, Any] | None

    @property
    def kind(self) -> tuple[str, str, str]:
        return self.layout, str(self.weights), str(self.data)


def compressed_files(
    config: LanguageConfig,
    weights: TensorReader,
    schemes: Mapping[str, Scheme],
    *,
    hub: dict[str, Any] | None = None,
    dtype: Any = None,
    shard_bytes: float = 5e9,
) -> list[File]:
    """Returns the files of a Hub folder for a quantized model. Other arguments are those of `hub_files`.

    Args:
        weights: the arrays of the quantized model, by per-layer name.
        schemes: the scheme of each quantized contraction, by its per-layer name, such as layers.3.attn.q.

    Raises:
        Unsupported: no layout can express a scheme, or the way in which the family stores a weight.
    """
    model = quantized_model(config, schemes)
    contractions = {n: of for n, of in find(model, ".*").items() if n in schemes and isinstance(of, QuantizedEinsum)}
    table = KeyMap(*config.hub_rows())
    for name, paths in table.ours_of(table.names).items():
        _check_parts(name, paths, contractions)
    parts = ("plain", "values", "scale", "minimum", "outer", "x_scale", "blocks")
    whole = {part: _WholeWeights(config, weights, contractions, part) for part in parts}
    kinds = {name: dtype for name in whole["plain"].names if not _is_code(name, contractions)} if dtype is not None else None
    plain = list(table.inverse(cast_weights(config, whole["plain"], kinds)))
    entries = {part: {e.name: e for e in table.inverse(whole[part])} for part in whole if part != "plain"}
    modules: dict[str, WrittenModule] = {}
    cache: dict[Any, WrittenModule] = {}
    out: list[TensorEntry] = []
    for entry in plain:
        paths = table.ours_of([entry.name]).get(entry.name, ())
        names = [path.removesuffix(".w") for path in paths if _is_code(path, contractions)]
        if not names and entry.dtype != PACKED:
            out.append(entry)
            continue
        if not names or not entry.name.endswith(".weight") or len(entry.shape) != 2:
            problem = f"`{entry.name}`: compressed-tensors has no place for experts that are fused into one tensor"
            raise Unsupported(problem, hint=WAY_OUT)
        scheme, of = schemes[names[0]], contractions[names[0]]
        key = re.sub(r"\d+", "", entry.name), entry.shape, scheme
        if key not in cache:
            cache[key] = _written_module(names[0], scheme, of, entry.shape, entries["blocks"][entry.name])
        modules[entry.name.removesuffix(".weight")] = cache[key]
        out += _packed_entries(entry.name.removesuffix(".weight"), cache[key], {part: entries[part][entry.name] for part in entries})
    plain_names = [entry.name for entry in plain if entry.dtype != PACKED]
    kind = Counter(str(entry.dtype) for entry in plain if entry.dtype != PACKED).most_common(1)[0][0]
    linear = {f"{name}.w" for name, of in find(config.build(Unroll()), ".*").items() if not of.is_lookup}
    unquantized = [n.removesuffix(".weight") for n in plain_names if set(table.ours_of([n]).get(n, ())) & linear]
    return [
        *folder_files(out, shard_bytes),
        hub_config_file(config, hub, kind, quantization_config=_quantization_config(modules, unquantized)),
    ]


def _is_code(path: str, contractions: Mapping[str, QuantizedEinsum]) -> bool:
    return path.endswith(".w") and path.removesuffix(".w") in contractions


def _check_parts(name: str, paths: Sequence[str], contractions: Mapping[str, QuantizedEinsum]) -> None:
    """Checks that the weights that form one tensor on the Hub are quantized by the same scheme.

    Args:
        name: the tensor's name on the Hub.
        paths: our names of the weights that form it.

    Raises:
        Unsupported: their schemes differ, or a weight is an embedding.
    """
    names = [path.removesuffix(".w") for path in paths if _is_code(path, contractions)]
    if names and (len(names) < len(paths) or len({contractions[n].scheme for n in names}) != 1):
        problem = f"`{name}` is one tensor on the Hub, and its parts are quantized in different ways: {', '.join(paths)}"
        raise Unsupported(problem, hint="one rule for all of them")
    if any(contractions[n].is_lookup for n in names):
        raise Unsupported(f"`{names[0]}`: compressed-tensors packs matrices of layers, not embeddings", hint=WAY_OUT)


# ---------------------------------------------------------------- what a module becomes


def _written_module(name: str, scheme: Scheme, of: QuantizedEinsum, shape: Shape, blocks: TensorEntry) -> WrittenModule:
    """Selects how a module is written.

    Args:
        shape: the shape of the matrix on the Hub, [outputs, inputs].
        blocks: the matrix on the Hub, with the index of its block in place of each number.

    Raises:
        Unsupported: no layout keeps the numbers of the module.
    """
    each = dict(zip(of.spec, scheme.block(of)[of.stacked :], strict=True))
    columns = math.prod(each[letter] for letter in of.inner)
    columns = shape[1] if columns == math.prod(of.sizes[letter] for letter in of.inner) else columns
    outputs = [letter for letter in of.spec if letter not in of.inner + of.group]
    is_tensor = columns == shape[1] and all(each[letter] == of.sizes[letter] for letter in outputs)
    symmetric = scheme.calibration != "minmax"
    args: dict[str, Any] = {"symmetric": symmetric, "dynamic": False, "group_size": None}
    where = f"`{name}` in {scheme.weights}"
    if scheme.weights in BITS:
        args |= {"num_bits": BITS[scheme.weights], "type": "int"}
        layout = "int-quantized" if scheme.weights == scheme.activations == "int8" else "pack-quantized"
        block = 1, columns
    elif scheme.weights == "fp8_e4m3":
        args |= {"num_bits": 8, "type": "float"}
        layout, block = "float-quantized", shape if is_tensor else (1, columns) if columns == shape[1] else _tile(scheme, where)
    elif scheme.weights in FP4_COLUMNS:
        args |= {"num_bits": 4, "type": "float", "scale_dtype": "torch.float8_e4m3fn" if scheme.weights == "nvfp4" else "torch.uint8"}
        layout, block = f"{scheme.weights}-pack-quantized", (1, FP4_COLUMNS[scheme.weights])
        if columns < block[1]:
            raise Unsupported(f"{where}: blocks of {block[1]} do not divide its {shape[1]} inputs", hint=WAY_OUT)
    else:
        raise Unsupported(f"{where}: compressed-tensors has no such format", hint=f"int8, int4, fp8_e4m3, nvfp4, mxfp4; {WAY_OUT}")
    args |= _strategy(scheme.weights, block, shape)
    if not _divides(blocks, block) or (block[0] == 1 and shape[1] % block[1]):
        tile = f"{block[0]} x {block[1]}"
        raise Unsupported(f"{where}: its scales are not those of blocks of {tile} in the Hub's layout", hint=WAY_OUT)
    return WrittenModule(layout, (block[0], block[1]), args, _data(scheme, where))


def _tile(scheme: Scheme, where: str) -> tuple[int, int]:
    """Returns the numbers of rows and of columns of a tile."""
    parts = str(scheme.granularity).split("x")
    if len(parts) != 2:
        raise Unsupported(f"{where}: fp8 has scales for a tensor, channels or tiles there, not for groups", hint="granularity: 128x128")
    return int(parts[1]), int(parts[0])


def _strategy(format: str, block: Shape, shape: Shape) -> dict[str, Any]:
    """Returns the `strategy` of the scales and its sizes, as entries of a config group."""
    if format in FP4_COLUMNS:
        return {"strategy": "tensor_group" if format == "nvfp4" else "group", "group_size": block[1]}
    if tuple(block) == tuple(shape):
        return {"strategy": "tensor"}
    if block[0] == 1:
        return {"strategy": "channel"} if block[1] == shape[1] else {"strategy": "group", "group_size": block[1]}
    return {"strategy": "block", "block_structure": list(block)}


def _data(scheme: Scheme, where: str) -> dict[str, Any] | None:
    """Returns the `input_activations` of a config group; None where activations are not rounded."""
    if scheme.activations is None:
        return None
    args = {"symmetric": True, "dynamic": not scheme.is_static, "group_size": None}
    kind = PRODUCTS.get((scheme.weights, scheme.activations))
    if kind is None:
        problem = f"{where}, with data in {scheme.activations}: transformers and vLLM do not multiply these"
        raise Unsupported(problem, hint="int8 with int8 or int4, fp8_e4m3 with fp8_e4m3; or leave out `activations`")
    args |= {"num_bits": kind[0], "type": kind[1]}
    if scheme.is_static:
        if scheme.weights != scheme.activations:
            problem = f"{where}, with data in {scheme.activations} by a static scale: vLLM does not multiply these"
            raise Unsupported(problem, hint="activations_scale: dynamic, or the weights in the same format")
        return args | {"strategy": "tensor"}
    if scheme.activations == "mxfp4":
        return args | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    block = scheme.activation_block
    return args | ({"strategy": "token"} if block is None else {"strategy": "group", "group_size": block})


def _divides(blocks: TensorEntry, block: Shape) -> bool:
    """Whether each block of the Hub's layout lies within one of our blocks."""
    numbers = blocks.make()
    rows, columns = (np.arange(0, size, each) for size, each in zip(numbers.shape, block, strict=True))

    def of_tiles(reduce: Any) -> np.ndarray:
        return reduce.reduceat(reduce.reduceat(numbers, rows, 0), columns, 1)

    return bool((of_tiles(np.maximum) == of_tiles(np.minimum)).all())


def _quantization_config(modules: Mapping[str, WrittenModule], unquantized: list[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of config.json."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name, module in modules.items():
        groups.setdefault(module.kind, []).append(name)
    layouts = sorted({module.layout for module in modules.values()})
    config_groups = {}
    for i, names in enumerate(groups.values()):
        module = modules[names[0]]
        config_groups[f"group_{i}"] = {
            "targets": names if len(groups) > 1 else ["Linear"],
            "weights": module.weights,
            "input_activations": module.data,
            "output_activations": None,
            "format": module.layout,
        }
    # A tied head is a module without a tensor of its own.
    ignored = [*unquantized, *(["lm_head"] if "lm_head" not in [*modules, *unquantized] else [])]
    return {
        "quant_method": "compressed-tensors",
        "format": layouts[0] if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ignored,
        "config_groups": config_groups,
    }


# ---------------------------------------------------------------- tensors


class _WholeWeights:
    """A reader of a quantized model under the names of the unquantized one. It gives one part of each quantized weight, repeated to
    the shape of the weight.

    Args:
        part: values, scale, minimum, outer or x_scale. `blocks` gives the index of each number's block. `plain` reads only weights
            that are not quantized.
    """

    def __init__(self, config: LanguageConfig, weights: TensorReader, contractions: Mapping[str, QuantizedEinsum], part: str):
        self.weights, self.contractions, self.part = weights, contractions, part
        self._shapes = {name: tuple(v.shape) for name, v in variables(config.build(Unroll())).items()}

    @property
    def names(self) -> KeysView[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        if not _is_code(name, self.contractions):
            return self.weights.dtype(name)
        if self.part in ("plain", "blocks"):
            return PACKED if self.part == "plain" else np.dtype(np.uint32)
        path = f"{name.removesuffix('.w')}.{self.part}"
        return self.weights.dtype(path) if path in self.weights.names else np.dtype(np.float32)

    def read(self, name: str) -> np.ndarray:
        if not _is_code(name, self.contractions):
            return self.weights.read(name)
        of, shape = self.contractions[name.removesuffix(".w")], self._shapes[name]
        if self.part == "blocks":
            # The indices must differ between the weights of one matrix, so they start at a number from the name.
            first = list(self.contractions).index(name.removesuffix(".w")) % 15 << 28
            counts = tuple(size // each for size, each in zip(shape, of.scheme.block(of), strict=True))
            numbers = np.arange(first, first + math.prod(counts), dtype=np.uint32).reshape(counts)
            return np.asarray(spread(jnp.asarray(numbers), shape)) + np.zeros(shape, np.uint32)
        array = jnp.asarray(self.weights.read(f"{name.removesuffix('.w')}.{self.part}"))
        if self.part == "x_scale":
            return np.broadcast_to(np.asarray(array), shape)
        if self.part == "values":
            return np.asarray(unpack_codes(array, of.packed, of.bits) if of.packed else array)
        return np.broadcast_to(np.asarray(spread(array, shape)), shape)


def _packed_entries(name: str, module: WrittenModule, whole: Mapping[str, TensorEntry]) -> Iterator[TensorEntry]:
    """Yields the tensors of a module.

    Args:
        whole: the parts of the module (values, scale, ...), each repeated to the shape of the weight.
    """
    shape, args = whole["values"].shape, module.weights
    bits, counts = args["num_bits"], tuple(-(-size // each) for size, each in zip(shape, module.block, strict=True))
    symmetric = args["symmetric"]

    def values() -> np.ndarray:
        return whole["values"].make()

    def blocks(part: str) -> np.ndarray:
        return np.ascontiguousarray(whole[part].make()[:: module.block[0], :: module.block[1]])

    def zeros() -> np.ndarray:
        return np.rint(blocks("minimum") / blocks("scale")).astype(np.int16)

    def entry(end: str, shape: Shape, dtype: Any, make: Any) -> TensorEntry:
        return TensorEntry(f"{name}.{end}", tuple(shape), np.dtype(dtype), make)

    scales = np.float32
    if module.layout == "pack-quantized":
        # Our codes of eight bits are signed, those of fewer bits begin at 0.
        shift, count = (128 if bits == 8 else 0), 32 // bits
        make = lambda: packed_words((values().astype(np.int16) + shift).astype(np.uint8), bits, 1)  # noqa: E731
        yield entry("weight_packed", (shape[0], -(-shape[1] // count)), np.int32, make)
        yield entry("weight_shape", (2,), np.int64, partial(np.asarray, shape, np.int64))
        if not symmetric:
            make = lambda: packed_words((zeros() + shift).astype(np.uint8), bits, 0)  # noqa: E731
            yield entry("weight_zero_point", (-(-shape[0] // count), counts[1]), np.int32, make)
    elif module.layout.endswith("fp4-pack-quantized"):
        yield entry("weight_packed", (shape[0], shape[1] // 2), np.uint8, lambda: (codes := values())[:, ::2] | codes[:, 1::2] << 4)
        scales = whole["scale"].dtype
        if args["strategy"] == "tensor_group":
            yield entry("weight_global_scale", (1,), np.float32, lambda: np.float32(1) / whole["outer"].make()[0, :1])
    else:
        yield entry("weight", shape, np.int8 if args["type"] == "int" else ml_dtypes.float8_e4m3fn, values)
        if not symmetric:
            yield entry("weight_zero_point", counts, np.int8, lambda: zeros().astype(np.int8))
    if module.data is not None and not module.data["dynamic"]:
        yield entry("input_scale", (1,), np.float32, lambda: whole["x_scale"].make().max().reshape(1))
    if args["strategy"] == "tensor":
        yield entry("weight_scale", (1,), scales, lambda: blocks("scale").reshape(1))
    else:
        yield entry("weight_scale", counts, scales, lambda: blocks("scale"))
