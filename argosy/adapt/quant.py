"""Quantizes weights to int8 (`swap(model, where, int8)`) or any other number format.

A `Scheme` says how one contraction is quantized. `QuantizedEinsum` replaces an `Einsum`, whose bias and equation it keeps. On a CPU the
engine multiplies the codes directly (`infer.cpu.panels`). In training, in `logits` and in `score`, quantized weights are slower than
float32 on a CPU, because XLA first converts them to floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from argosy.adapt.formats.activations import Activations
from argosy.adapt.formats.blocks import Granularity, block_of, pack_axis
from argosy.adapt.formats.format import Format, Limits, limits_of
from argosy.adapt.formats.table import FORMATS
from argosy.adapt.surgery import find, put_at
from argosy.core.errors import BadInput, Unsupported
from argosy.models.parts.einsum import Contraction, Einsum
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import Codes, Draw, Meaning
from argosy.ops.native.products import Panels
from argosy.ops.quantized import Quantized, unpacked_shape

# The arrays of a quantized weight. Each is a separate variable.
PARTS = ("values", "scale", "minimum", "outer", "x_scale")


@dataclass(frozen=True)
class Scheme:
    """The quantization of one contraction.

    weights: the number format of the weights, a key of `FORMATS`.
    granularity: the weights that share a scale (`formats.blocks`). None stands for the format's own granularity.
    calibration: the represented range of each block, as in `Format.quantize`.
    activations: the number format of activations. None leaves them unrounded.
    activation_block: the number of activations that share a scale. None stands for the format's own block, or a whole row.
    activations_scale: `dynamic` for scales from the largest magnitude of the activations themselves, `static` for one number from
        calibration.
    """

    weights: str = "int8"
    granularity: Granularity = None
    calibration: str = "absmax"
    activations: str | None = None
    activation_block: int | None = None
    activations_scale: str = "dynamic"

    @property
    def is_static(self) -> bool:
        """Whether activations have a static scale from calibration."""
        return self.activations_scale == "static"

    def check(self) -> None:
        """Checks that the format and the kind of scale exist.

        Raises:
            ValueError: the format or the kind of scale does not exist.
        """
        if self.activations_scale not in ("dynamic", "static"):
            raise ValueError(f"no scale of data `{self.activations_scale}`")
        for name in (self.weights, self.activations):
            if name is not None and name not in FORMATS:
                raise ValueError(f"no number format `{name}`")

    @property
    def format(self) -> Format:
        """The number format of the weights."""
        return FORMATS[self.weights]

    def block(self, of: Contraction) -> tuple[int, ...]:
        """Returns the number of weights that share a scale along each axis of the weight."""
        return block_of(of, self.granularity, self.format.block)

    def quantize(self, of: Contraction, w: Any) -> Quantized:
        """Quantizes a weight of the contraction to nearest. `w` may also be a single layer or expert, with a leading axis of size 1."""
        lead = w.ndim - len(of.spec)
        block = (*(1,) * lead, *self.block(of)[of.stacked :])
        out = self.format.quantize(w, block, self.calibration, lead=lead + len(of.group), pack=pack_axis(of))
        return self._completed(out, w.shape[:lead])

    def limits(self, of: Contraction, w: Any) -> Limits:
        """Returns the range of each block of a weight, according to `calibration`."""
        return limits_of(w, (*(1,) * (w.ndim - len(of.spec)), *self.block(of)[of.stacked :]), self.calibration)

    def within(self, of: Contraction, w: Any, limits: Limits) -> Quantized:
        """Quantizes a weight of the contraction to nearest, with a given range of each block."""
        lead = w.ndim - len(of.spec)
        block = (*(1,) * lead, *self.block(of)[of.stacked :])
        out = self.format.rounded(w, block, limits, lead=lead + len(of.group), pack=pack_axis(of))
        return self._completed(out, w.shape[:lead])

    def rounding(self) -> Activations | None:
        """Returns the rounding of activations; None if they are not rounded."""
        return None if self.activations is None else Activations(self.activations, self.activation_block)

    def _completed(self, w: Quantized, layers: tuple[int, ...]) -> Quantized:
        """Adds the rounding of activations to a quantized weight. A static scale is 1 until calibration replaces it."""
        return replace(w, activations=self.rounding(), x_scale=jnp.ones(layers, jnp.float32) if self.is_static else None)


# `Quantized.dequantized` as one compiled program, for use outside of compiled programs.
as_floats: Any = jax.jit(Quantized.dequantized)


class QuantizedEinsum(Contraction):
    """An `Einsum` whose weight is a quantized array and is not trained.

    Args:
        of: the contraction that this one replaces.
        w: the quantized weight, or the shapes of its arrays.
        scheme: the scheme by which new values of the weight are quantized (`codes`).
    """

    values: Codes
    scale: Codes
    minimum: Codes | None
    outer: Codes | None
    x_scale: Codes | None

    def __init__(self, of: Einsum, w: Quantized, scheme: Scheme):
        self.eq, self.legend, self.b, self.several, self.scheme = of.eq, of.legend, of.b, of.several, scheme
        meaning = of.w.get_metadata()["meaning"]
        # Scales have every letter of the weight, and size 1 along shared axes.
        scales = Meaning(meaning.letters, "", meaning.group, meaning.legend)
        meanings = {"values": meaning, "x_scale": Meaning("")}
        for name in PARTS:
            array = getattr(w, name)
            part = None if array is None else Codes(array, meaning=meanings.get(name, scales), draw=Draw())
            setattr(self, name, part)
        self.levels, self.packed, self.bits, self.zero = w.levels, w.packed, w.bits, w.zero
        self.activations = w.activations

    @property
    def fixed(self) -> dict[str, Any]:
        """The attributes of the quantized weight that are not arrays."""
        return {name: getattr(self, name) for name in ("levels", "packed", "bits", "zero", "activations")}

    @property
    def weight(self) -> Quantized:
        return self.with_parts({name: None if (part := getattr(self, name)) is None else part[...] for name in PARTS})

    def with_parts(self, parts: Mapping[str, Any]) -> Quantized:
        """Returns a quantized weight of this format with these arrays, by the names of `PARTS`."""
        return Quantized(**parts, **self.fixed)

    @property
    def shape(self) -> tuple[int, ...]:
        return unpacked_shape(self.values.shape, self.packed, self.bits)

    def put(self, w: Quantized) -> None:
        """Replaces the arrays of the weight by those of another weight of this format."""
        for name in PARTS:
            if (part := getattr(self, name)) is not None:
                part.set_value(getattr(w, name))

    def codes(self, w: Any) -> Quantized:
        """Quantizes new values of this weight. `w` may also be a single layer or expert, with a leading axis of size 1."""
        return self.scheme.quantize(self, w)


INT8 = Scheme("int8")


def int8(of: Contraction) -> QuantizedEinsum:
    """Returns the contraction with its weight in int8, with a scale for each output channel, or for each row of an embedding.

    Raises:
        BadInput: the contraction is already quantized, or has an adapter.
    """
    return quantized_einsum(of, INT8)


def quantized_einsum(of: Contraction, scheme: Scheme) -> QuantizedEinsum:
    """Returns the contraction with its weight quantized by a scheme.

    Args:
        of: the contraction. Its weight may be a description without an array.

    Raises:
        BadInput: the contraction is already quantized, or has an adapter.
    """
    name = scheme.weights
    if not isinstance(of, Einsum):
        problem = "is quantized already" if isinstance(of, QuantizedEinsum) else "has an adapter"
        raise BadInput(f"{name}: {of.eq} {problem}", hint="quantize the plain model first, then put adapters on it")
    w = of.w.get_value()
    if isinstance(w, Panels):
        raise BadInput(f"{name}: the weight of {of.eq} is packed for answers alone", hint="load the model without blocks=True")
    if isinstance(w, jax.ShapeDtypeStruct):
        return QuantizedEinsum(of, jax.eval_shape(lambda w: scheme.quantize(of, w), w), scheme)
    return QuantizedEinsum(of, scheme.quantize(of, w), scheme)


def apply_schemes(model: nnx.Module, schemes: Mapping[str, Scheme]) -> list[str]:
    """Quantizes contractions of a model in place. The model may be a description. Returns the names of the contractions in the model's
    layout.

    Args:
        schemes: the scheme of each contraction, by its per-layer name, such as layers.3.attn.q.

    Raises:
        Unsupported: layers that are stacked have different schemes.
    """
    if not schemes:
        # A convolutional network has no contractions to look through.
        return []
    names, out, all_layers = layer_addresses(model), list[str](), set[str]()
    for name, of in find(model, ".*").items():
        layers = [address.removesuffix(".w") for address in names(f"{name}.w")]
        layer_schemes = [schemes.get(layer) for layer in layers]
        if all(scheme is None for scheme in layer_schemes):
            continue
        first = next(scheme for scheme in layer_schemes if scheme is not None)
        if any(scheme != first for scheme in layer_schemes):
            raise Unsupported(f"the layers of {name} are quantized in different ways, and stacked", hint="execution.layers=unroll")
        put_at(model, name, quantized_einsum(of, first))
        out.append(name)
        all_layers |= set(layers)
    if missing := schemes.keys() - all_layers:
        raise BadInput(f"the model has no {', '.join(sorted(missing)[:3])}", hint="do the model's settings belong to these weights?")
    return out


def by_layer(model: nnx.Module, schemes: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Converts schemes by names in the model's layout to schemes by per-layer names."""
    names = layer_addresses(model)
    return {address.removesuffix(".w"): scheme for name, scheme in schemes.items() for address in names(f"{name}.w")}


def are_alike(model: nnx.Module, schemes: Mapping[str, Scheme]) -> bool:
    """Whether layers that are stacked in a model have equal schemes."""
    if not schemes:
        return True
    names = layer_addresses(model)
    groups = [[schemes.get(address.removesuffix(".w")) for address in names(f"{name}.w")] for name in find(model, ".*")]
    return all(len(set(group)) == 1 for group in groups)


def is_quantized(model: nnx.Module) -> bool:
    """Whether any contraction of the model is quantized."""
    return any(isinstance(m, QuantizedEinsum) for _, m in nnx.iter_modules(model))
