"""Reads and writes parameter trees of Qwix (0.1.8): nested dicts under a model's own names, whose quantized leaves are dicts.

    {"layers": {"0": {"attn": {"q": {"w": {"array": {"qvalue": ..., "scale": ..., "zero_point": ...}}}}}}}

    w = (qvalue - zero_point) * scale        the scale of a block is repeated over it

`qwix.process_prequantized_params` and `qwix.restore_quantization_rules` read this form, and the state of a model that Qwix quantized
has it as a pure dict. The level `array` may be left out. Types are int8, int4, nf4 (uint4) and fp8, with scales for channels or for
blocks that a rule here can express. Others are errors that name the type. Qwix is not imported.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.adapt.formats.blocks import Granularity, block_of, pack_axis
from argosy.adapt.formats.table import FORMATS, NF4
from argosy.adapt.quant import QuantizedEinsum, Scheme
from argosy.adapt.surgery import find, put_at
from argosy.core.errors import BadInput, Unsupported
from argosy.models.parts.einsum import Contraction, Einsum
from argosy.models.parts.weight import put, variables
from argosy.ops.quantized import Quantized, packed_codes, unpack_codes

ARRAY, QVALUE, SCALE, ZERO = "array", "qvalue", "scale", "zero_point"
# The format of weights for each type of qvalue.
KINDS = {
    **{"int8": "int8", "int4": "int4", "uint4": "nf4"},
    **{"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"},
}
WAY_OUT = "quantize the float model here: `argosy quantize`, or lm.quantize with the same rules"


def put_qwix_params(model: Any, params: Mapping[str, Any]) -> list[str]:
    """Fills a model, in place, with the parameters of a model that Qwix quantized. Returns the names of the quantized contractions, at
    least one.

    Raises:
        BadInput: a parameter is missing, has another shape, or does not exist in the model.
        Unsupported: a type or a shape of blocks has no counterpart here.
    """
    leaves = dict(_leaves(params))
    by_address = variables(model)
    unknown, missing = leaves.keys() - by_address.keys(), by_address.keys() - leaves.keys()
    if unknown or missing:
        problem = f"no parameter `{min(missing)}`" if missing else f"a parameter `{min(unknown)}` that the model does not have"
        raise BadInput(f"the tree of Qwix has {problem}", hint="its names are those of `argosy models show`, with a level for each dot")
    contractions, names = find(model, ".*"), list[str]()
    for address, leaf in leaves.items():
        if not isinstance(leaf, Mapping):
            put(model, {address: jnp.asarray(leaf)})
            continue
        name = address.removesuffix(".w")
        if not isinstance(of := contractions.get(name), Einsum):
            raise BadInput(f"`{address}` is quantized in the tree of Qwix and no plain contraction here", hint=WAY_OUT)
        put_at(model, name, QuantizedEinsum(of, *_weight(of, name, leaf)))
        names.append(name)
    if not names:
        raise BadInput("the tree of Qwix has no quantized parameter", hint="a quantized leaf is a dict with qvalue and scale")
    return names


def qwix_params(model: Any) -> dict[str, Any]:
    """Returns the parameters of a model in the form of Qwix.

    Raises:
        Unsupported: Qwix stores a number format of the model differently.
    """
    out: dict[str, Any] = {}
    quantized = {name: of for name, of in find(model, ".*").items() if isinstance(of, QuantizedEinsum)}
    for address, v in variables(model).items():
        if address.rpartition(".")[0] not in quantized or address.endswith(".b"):
            _set(out, address, v.get_value())
    for name, of in quantized.items():
        _set(out, f"{name}.w", {ARRAY: _leaf(name, of)})
    return out


def _leaves(tree: Mapping[str, Any], way: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, leaf). The leaf of a quantized weight is the dict with its arrays."""
    for key, value in tree.items():
        path = (*way, str(key))
        if not isinstance(value, Mapping):
            yield ".".join(path), value
        elif QVALUE in value:
            yield ".".join(path[:-1] if key == ARRAY else path), value
        else:
            yield from _leaves(value, path)


def _set(tree: dict[str, Any], address: str, value: Any) -> None:
    *way, last = address.split(".")
    for step in way:
        tree = tree.setdefault(step, {})
    tree[last] = value


def _weight(of: Einsum, name: str, leaf: Mapping[str, Any]) -> tuple[Quantized, Scheme]:
    if rest := leaf.keys() - {QVALUE, SCALE, ZERO}:
        raise Unsupported(f"`{name}`: Qwix's `{min(rest)}` is not known here", hint=WAY_OUT)
    values, scale, zero = leaf[QVALUE], jnp.asarray(leaf[SCALE], jnp.float32), leaf.get(ZERO)
    if tuple(values.shape) != of.shape:
        raise BadInput(f"`{name}`: qvalue is {tuple(values.shape)}, not {of.shape}", hint=WAY_OUT)
    kind = KINDS.get(np.dtype(values.dtype).name)
    if kind is None:
        raise Unsupported(f"`{name}`: qvalue is {values.dtype}; {', '.join(KINDS)} are known", hint=WAY_OUT)
    block = tuple(n // s for n, s in zip(values.shape, scale.shape, strict=True))
    scheme = Scheme(kind, _granularity(of, name, block), "absmax" if zero is None else "minmax")
    minimum = None if zero is None else jnp.asarray(zero, jnp.float32) * scale
    if kind in ("int8", "fp8_e4m3", "fp8_e5m2"):
        return Quantized(jnp.asarray(values), scale, minimum), scheme
    more: dict[str, Any] = {"levels": NF4} if kind == "nf4" else {"zero": 8}
    codes = jnp.asarray(values).astype(jnp.int8) + (0 if kind == "nf4" else 8)
    if zero is not None:
        # Codes begin at 0, as in formats with a minimum.
        more, minimum = {}, (jnp.asarray(zero, jnp.float32) + 8) * scale
    codes, axis = codes.astype(jnp.uint8), pack_axis(of)
    if codes.shape[axis] % 2 == 0:
        return Quantized(packed_codes(codes, axis), scale, minimum, packed=axis, **more), scheme
    return Quantized(codes, scale, minimum, **more), scheme


def _granularity(of: Contraction, name: str, block: tuple[int, ...]) -> Granularity:
    """Returns the granularity that has blocks of these sizes."""
    summed = [i + of.stacked for i, letter in enumerate(of.spec) if letter in of.inner]
    along = int(np.prod([block[i] for i in summed]))
    options: tuple[Granularity, ...] = ("channel", "tensor", along)
    for option in options:
        if block_of(of, option) == block:
            return option
    raise Unsupported(f"`{name}`: scales of blocks {block} of {of.eq} cannot be said here", hint=WAY_OUT)


def _leaf(name: str, of: QuantizedEinsum) -> dict[str, Any]:
    w, kind = of.weight, of.scheme.weights
    if kind not in KINDS.values() or w.outer is not None:
        raise Unsupported(f"`{name}` is {kind}, which Qwix stores otherwise", hint=f"{', '.join(KINDS.values())} are written")
    if w.x_scale is not None:
        raise Unsupported(f"`{name}` has a static scale of data, which trees of parameters do not hold", hint=WAY_OUT)
    values = unpack_codes(w.values, w.packed, w.bits) if w.packed else w.values
    if kind == "nf4":
        return {QVALUE: values.astype(jnp.uint4), SCALE: w.scales}
    shift = 8 if FORMATS[kind].bits == 4 else 0
    dtype = jnp.int4 if shift else values.dtype
    out = {QVALUE: (values.astype(jnp.int8) - shift).astype(dtype) if shift else values, SCALE: w.scales}
    if w.minimum is not None:
        out[ZERO] = (jnp.round(w.minimum / w.scales) - shift).astype(dtype)
    return out
