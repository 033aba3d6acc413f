"""Stored models with quantized weights: the names of their arrays, and readers that quantize or dequantize.

A quantized contraction "layers.3.attn.q" has, in place of "layers.3.attn.q.w", the arrays "layers.3.attn.q.values", "....scale" and
so on (`adapt.quant.PARTS`). `DequantizedTensors` gives code that knows only floats the dequantized weights, one at a time.
"""

from collections.abc import Callable, Iterator, KeysView, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from argosy.adapt.quant import PARTS, QuantizedEinsum, Scheme, apply_schemes
from argosy.adapt.surgery import find
from argosy.core.errors import BadInput
from argosy.core.formats import Shape, TensorReader
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Unroll
from argosy.models.parts.weight import Leaves, variables
from argosy.ops.quantized import Quantized


@dataclass(frozen=True)
class QuantizedWeights:
    """The weights of a quantized model.

    schemes: the scheme of each quantized contraction, by its per-layer name, such as layers.3.attn.q.
    reader: reads the arrays, by per-layer name.
    """

    schemes: Mapping[str, Scheme]
    reader: TensorReader


def quantized_model(config: Any, schemes: Mapping[str, Scheme]) -> nnx.Module:
    """Builds the description of a quantized model, with unrolled layers and without arrays."""
    model = config.build(Unroll())
    apply_schemes(model, schemes)
    return model


class DequantizedTensors:
    """A `TensorReader` that dequantizes the weights of a quantized model, under the names of the unquantized model. Quantized weights
    become float32."""

    def __init__(self, config: Any, quantized: QuantizedWeights):
        self.reader = quantized.reader
        self.contractions: dict[str, QuantizedEinsum] = {
            f"{name}.w": of for name, of in find(quantized_model(config, quantized.schemes), ".*").items() if name in quantized.schemes
        }
        shapes = {name: tuple(v.shape) for name, v in variables(config.build(Unroll())).items()}
        here = {name: i for i, name in enumerate(self.reader.names)}

        def order(name: str) -> int:
            return here[f"{name.removesuffix('.w')}.values" if name in self.contractions else name]

        # In the order of the files.
        self._shapes = {name: shapes[name] for name in sorted(shapes, key=order)}

    @property
    def names(self) -> KeysView[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self.contractions else self.reader.dtype(name)

    def read(self, name: str) -> np.ndarray:
        if (of := self.contractions.get(name)) is None:
            return self.reader.read(name)
        return np.asarray(read_quantized(self.reader, name.removesuffix(".w"), of).dequantized())


def read_quantized(reader: TensorReader, name: str, of: QuantizedEinsum) -> Quantized:
    """Reads the quantized weight of a contraction.

    Args:
        name: the per-layer name of the contraction.
        of: the contraction.
    """
    arrays = {part: jnp.asarray(reader.read(f"{name}.{part}")) for part in PARTS if getattr(of, part) is not None}
    return Quantized(**dict.fromkeys(PARTS) | arrays, **of.fixed)


class RoundedTensors:
    """A `TensorReader` of a quantized model that quantizes the weights of an unquantized model when they are read.

    Args:
        weights: reads the weights of the unquantized model, by per-layer name.
        schemes: the scheme of each contraction to be quantized, by per-layer name.
        quantize: called with (per-layer name, contraction, weight), returns the quantized weight.
        seen: called once for each quantized weight, with the arguments and the result of `quantize`.

    Raises:
        BadInput: a weight is not finite. This is found when it is read.
    """

    def __init__(
        self,
        config: Any,
        weights: TensorReader,
        schemes: Mapping[str, Scheme],
        quantize: Callable[[str, Contraction, np.ndarray], Quantized],
        seen: Callable[[str, Contraction, np.ndarray, Quantized], None] = lambda *_: None,
    ):
        self.weights, self.quantize, self.seen, self._seen = weights, quantize, seen, set[str]()
        model = quantized_model(config, schemes)
        self.contractions = {name: of for name, of in find(model, ".*").items() if name in schemes}
        self._shapes: Leaves = dict(self._in_order(variables(model)))
        self._last: tuple[str, Quantized] | None = None

    def _in_order(self, model_weights: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the names and weights in the order in which the unquantized weights are stored."""
        for name in self.weights.names:
            module = name.removesuffix(".w")
            parts = [f"{module}.{part}" for part in PARTS] if module in self.contractions and name.endswith(".w") else [name]
            yield from ((part, model_weights[part]) for part in parts if part in model_weights)

    @property
    def names(self) -> KeysView[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> Shape:
        return tuple(self._shapes[name].shape)

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(self._shapes[name].dtype) if self._module(name) else self.weights.dtype(name)

    def _module(self, name: str) -> str | None:
        module, _, part = name.rpartition(".")
        return module if module in self.contractions and part in PARTS else None

    def read(self, name: str) -> np.ndarray:
        module = self._module(name)
        if module is None:
            return self.weights.read(name)
        if self._last is None or self._last[0] != module:
            # The arrays are freed before the next weight is read.
            self._last = None
            of, w = self.contractions[module], np.asarray(self.weights.read(f"{module}.w"), np.float32)
            if not np.isfinite(w).all():
                raise BadInput(f"`{module}.w` has numbers that are not finite", hint="is the source damaged? copy or download it again")
            quantized = self.quantize(module, of, w)
            if module not in self._seen:
                self._seen.add(module)
                self.seen(module, of, w, quantized)
            self._last = module, quantized
        return np.asarray(getattr(self._last[1], name.rpartition(".")[2]))

    def see_all(self) -> None:
        """Quantizes the weights that have not been read yet, so that `seen` has been called for every weight."""
        for module in self.contractions:
            if module not in self._seen:
                self.read(f"{module}.values")


# ---------------------------------------------------------------- as JSON


def describe_schemes(schemes: Mapping[str, Scheme]) -> list[dict[str, Any]]:
    """Returns schemes as JSON: each scheme once, with the names of its contractions."""
    out: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        out.setdefault(scheme, []).append(name)
    return [asdict(scheme) | {"modules": names} for scheme, names in out.items()]


def read_schemes(descriptions: list[dict[str, Any]], where: str) -> dict[str, Scheme]:
    """Parses the result of `describe_schemes`.

    Raises:
        BadInput: a description is not valid, or names a format that this version does not know.
    """
    out = {}
    for description in descriptions:
        description = dict(description)
        try:
            names, scheme = description.pop("modules"), Scheme(**description)
            scheme.check()
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"weights are quantized in a way that is not known here: {error}", where=where) from None
        out |= dict.fromkeys(names, scheme)
    return out
