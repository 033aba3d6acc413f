"""Quantizes the layers of a model one after the other, on calibration data.

    X_0 = embedding of the tokens
    for each layer:  statistics of the inputs of its contractions, from X_i and its weights as floats
                     its weights in few bits, by a method
                     X_(i+1) = the layer with these weights on X_i

So the statistics of a layer are those of a model whose earlier layers are quantized, as in GPTQ, and within the layer those of floats.
Only one layer's weights are in memory, with Gram matrices of its inputs. After a kill the next process goes on at the layer that was
reached, with the same results bit for bit (`calibration.folder`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.adapt.calibration.data import CalibrationData
from argosy.adapt.calibration.folder import CalibrationFolder, Row
from argosy.adapt.calibration.layers import LayerRunner
from argosy.adapt.calibration.statistics import InputStatistics
from argosy.adapt.methods.gptq import output_error
from argosy.adapt.methods.settings import RoundingMethod
from argosy.adapt.quant import PARTS, QuantizedEinsum
from argosy.core.errors import BadInput
from argosy.ops.quantized import Quantized

# Tokens of one call of a layer.
BATCH = 4096


@dataclass(frozen=True)
class CalibratedWeights:
    """The quantized weights of the layers.

    rows: what the data says of each weight, by its per-layer name: `output_error`, that of `nearest`, and `uncalibrated`, the share
        of its experts that too few tokens reached.
    """

    folder: CalibrationFolder
    places: Mapping[str, tuple[int, str]]
    rows: Mapping[str, Row]

    def read(self, name: str, of: QuantizedEinsum) -> Quantized:
        """A weight that was quantized, by its per-layer name."""
        layer, own = self.places[name]
        file, _ = self.folder.read_layer(layer)
        arrays = {part: jnp.asarray(file.read(f"{own}.{part}")) for part in PARTS if getattr(of, part) is not None}
        return Quantized(**dict.fromkeys(PARTS) | arrays, **of.fixed)


def calibrate(
    runner: LayerRunner,
    method: RoundingMethod,
    data: CalibrationData,
    folder: CalibrationFolder,
    done: Callable[[int, int], None] = lambda layers, all: None,
) -> CalibratedWeights:
    """Quantizes every layer.

    Args:
        folder: of this calibration; layers that are there are not quantized again.
        done: called with the number of layers that are done, and of all.

    Raises:
        BadInput: a weight is not finite.
    """
    rows = max(1, BATCH // data.tokens.shape[1])
    count, places, found = len(runner.plan), dict[str, tuple[int, str]](), dict[str, Row]()
    start = folder.layers
    if start == 0 and not folder.has_inputs(0):
        parts = range(0, len(data.tokens), rows)
        folder.write_inputs(0, runner.embedded((data.tokens[at : at + rows], data.segments[at : at + rows]) for at in parts))
    done(start, count)
    for i in range(start, count):
        _calibrate_layer(runner, method, data, folder, i, rows)
        done(i + 1, count)
    for i in range(count):
        for row in folder.read_layer(i)[1]:
            name = f"layers.{i}.{row['name']}"
            places[name], found[name] = (i, row["name"]), row
    return CalibratedWeights(folder, places, found)


def _calibrate_layer(
    runner: LayerRunner, method: RoundingMethod, data: CalibrationData, folder: CalibrationFolder, i: int, rows: int
) -> None:
    def batches() -> Iterator[tuple[Any, Any]]:
        for place, x in folder.read_inputs(i, rows):
            yield jnp.asarray(x), jnp.asarray(data.segments[place])

    leaves = runner.read(i)
    for name in runner.names[i]:
        if not bool(jnp.isfinite(leaves[f"{name}.w"]).all()):
            what = f"`layers.{i}.{name}.w` has numbers that are not finite"
            raise BadInput(what, hint="is the source damaged? copy or download it again")
    table: list[Row] = []
    quantized: dict[str, Quantized] = {}
    statistics = runner.statistics(i, leaves, batches()) if runner.names[i] else {}
    for name in runner.names[i]:
        of, inputs = runner.contraction(i, name), statistics.get(name)
        quantized[name], row = _round(of, leaves[f"{name}.w"], method, inputs)
        table.append({"name": name} | row)
    del statistics
    if i + 1 < len(runner.plan):
        folder.write_inputs(i + 1, (runner.outputs(i, leaves, quantized, x, segments) for x, segments in batches()))
    arrays = {
        f"{name}.{part}": np.asarray(array)
        for name, w in quantized.items()
        for part in PARTS
        if (array := getattr(w, part)) is not None
    }
    folder.write_layer(i, arrays, table)


def _round(of: QuantizedEinsum, w: Any, method: RoundingMethod, inputs: InputStatistics | None) -> tuple[Quantized, Row]:
    """A weight in few bits, and what the data says of it."""
    usable = None if inputs is None or not inputs.sufficient.any() else inputs
    quantized = method.quantize(of, w, of.scheme, usable)
    if inputs is None:
        return quantized, {"output_error": None, "nearest_error": None, "uncalibrated": 1.0}
    nearest = of.scheme.quantize(of, w).dequantized()
    errors = [output_error(of, w, rounded, inputs) for rounded in (quantized.dequantized(), nearest)]
    return quantized, {
        "output_error": errors[0],
        "nearest_error": errors[1],
        "uncalibrated": float(1 - inputs.sufficient.mean()),
    }
