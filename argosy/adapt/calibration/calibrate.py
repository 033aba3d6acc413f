"""Quantizes the layers of a model one after the other, on calibration data.

    X_0 = embedding of the tokens
    for each layer:  compute statistics of the inputs of its contractions, from X_i and float weights
                     quantize its weights by a method
                     X_(i+1) = the output of the quantized layer for X_i

So the statistics of a layer are those of a model whose earlier layers are quantized, as in GPTQ, while the layer itself is in floats.
Only the weights of one layer are in memory, with Gram matrices of its inputs. After a kill, the next process continues with the layer
that was not finished, with the same results bit for bit (`calibration.folder`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.adapt.calibration.data import CalibrationData
from argosy.adapt.calibration.folder import CalibrationFolder, Row
from argosy.adapt.calibration.layers import LayerRunner
from argosy.adapt.calibration.statistics import InputStatistics
from argosy.adapt.methods.awq import BalancedReader
from argosy.adapt.methods.balance import divided_inputs, fold_scales, reader_scales
from argosy.adapt.methods.gptq import output_error
from argosy.adapt.methods.settings import BalancingMethod, RoundingMethod
from argosy.adapt.quant import PARTS, QuantizedEinsum, as_floats
from argosy.core.errors import BadInput
from argosy.core.formats import TensorReader, TensorView
from argosy.core.process.resident import trim
from argosy.models.parts.weight import Leaves
from argosy.ops.quantized import Quantized

# The prefix, in the files of layers, of weights that balancing changed and no rule quantizes.
CHANGED = "changed:"
# The number of tokens of one call of a layer.
BATCH = 1024


@dataclass(frozen=True)
class CalibratedWeights:
    """The quantized weights of the layers.

    folder: the folder of the calibration.
    places: (layer, name in the layer's file) of each weight, by its per-layer name.
    rows: the results of each weight on the data, by its per-layer name. They are `error`, `output_error`, the output error of rounding
        to nearest, `uncalibrated` (the share of experts with too few tokens) and `balanced` (whether the inputs were scaled).
    """

    folder: CalibrationFolder
    places: Mapping[str, tuple[int, str]]
    rows: Mapping[str, Row]

    @property
    def changed_places(self) -> dict[str, tuple[int, str]]:
        """(layer, name in the layer's file) of each weight that balancing changed and no rule quantizes, by its per-layer name."""
        places = dict[str, tuple[int, str]]()
        for i in range(self.folder.layers):
            names = self.folder.read_layer(i)[0].names
            places |= {f"layers.{i}.{weight_name}": (i, name) for name in names if (weight_name := name.removeprefix(CHANGED)) != name}
        return places

    def changed(self, weights: TensorReader) -> TensorReader:
        """Returns a reader of the model's weights that replaces those that balancing changed and no rule quantizes, which are
        float32."""
        places = self.changed_places

        def change(name: str, read: Callable[[], np.ndarray], part: int | None) -> np.ndarray:
            if name not in places:
                return read()
            layer, stored_name = places[name]
            array = self.folder.read_layer(layer)[0].read(stored_name)
            return array if part is None else array[part]

        return TensorView(weights, dtypes=dict.fromkeys(places, np.dtype(np.float32)), change=change)

    def read(self, name: str, of: QuantizedEinsum) -> Quantized:
        """Reads a quantized weight. `name`, `of`: the per-layer name of its contraction, and the contraction."""
        layer, stored_name = self.places[name]
        file, _ = self.folder.read_layer(layer)
        arrays = {part: jnp.asarray(file.read(f"{stored_name}.{part}")) for part in PARTS if getattr(of, part) is not None}
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
        runner: runs the layers of the model.
        method: the method of rounding.
        data: the calibration data.
        folder: the folder of this calibration. Layers that it contains are not quantized again.
        done: called with the number of finished layers and the number of all layers.

    Raises:
        BadInput: a weight is not finite.
    """
    rows = max(1, BATCH // data.tokens.shape[1])
    count, places, row_by_name = len(runner.plan), dict[str, tuple[int, str]](), dict[str, Row]()
    start = folder.layers
    if start == 0 and not folder.has_inputs(0):
        parts = range(0, len(data.tokens), rows)
        folder.write_inputs(0, runner.embedded((data.tokens[at : at + rows], data.segments[at : at + rows]) for at in parts))
        trim()
    done(start, count)
    for i in range(start, count):
        _calibrate_layer(runner, method, data, folder, i, rows)
        trim()
        done(i + 1, count)
    for i in range(count):
        for row in folder.read_layer(i)[1]:
            name = f"layers.{i}.{row['name']}"
            places[name], row_by_name[name] = (i, row["name"]), row
    return CalibratedWeights(folder, places, row_by_name)


def _calibrate_layer(
    runner: LayerRunner, method: RoundingMethod, data: CalibrationData, folder: CalibrationFolder, i: int, rows: int
) -> None:
    def batches() -> Iterator[tuple[Any, Any]]:
        for place, x in folder.read_inputs(i, rows):
            yield jnp.asarray(x), jnp.asarray(data.segments[place])

    leaves = runner.read(i)
    for name in runner.names[i]:
        if not np.isfinite(np.asarray(leaves[f"{name}.w"])).all():
            problem = f"`layers.{i}.{name}.w` has numbers that are not finite"
            raise BadInput(problem, hint="is the source damaged? copy or download it again")
    table: list[Row] = []
    quantized: dict[str, Quantized] = {}
    statistics = runner.statistics(i, leaves, batches()) if runner.names[i] else {}
    # Memory of the compiler is not returned to the system by itself, and is more than a layer of a small model.
    trim()
    changed, balanced = _balanced(runner, i, leaves, statistics, method, next(batches()))
    for name in runner.names[i]:
        of, inputs = runner.contraction(i, name), statistics.get(name)
        original = (leaves[f"{name}.w"], balanced.get(name))
        quantized[name], row = _round(of, (leaves | changed)[f"{name}.w"], method, inputs, original)
        if (rounding := of.activations) is not None and of.scheme.is_static:
            scale = rounding.static_scale(_largest_input(f"layers.{i}.{name}", inputs))
            quantized[name] = replace(quantized[name], x_scale=jnp.asarray(scale))
        table.append({"name": name} | row | {"balanced": name in balanced})
        trim()
    del statistics
    leaves = leaves | changed
    if i + 1 < len(runner.plan):
        folder.write_inputs(i + 1, (runner.outputs(i, leaves, quantized, x, segments) for x, segments in batches()))
    arrays = {
        f"{name}.{part}": np.asarray(array)
        for name, w in quantized.items()
        for part in PARTS
        if (array := getattr(w, part)) is not None
    }
    unquantized = {name: w for name, w in changed.items() if name.removesuffix(".w") not in quantized}
    folder.write_layer(i, arrays | {f"{CHANGED}{name}": np.asarray(w) for name, w in unquantized.items()}, table)


def _largest_input(name: str, inputs: InputStatistics | None) -> float:
    """Returns the largest magnitude of the inputs of a contraction, over all experts.

    Raises:
        BadInput: no data reaches the contraction, or an input is not finite.
    """
    if inputs is None:
        raise BadInput(f"activations_scale=static: no data reaches `{name}`", hint="activations_scale: dynamic in a rule for it")
    largest = float(inputs.largest.max())
    if not math.isfinite(largest):
        raise BadInput(f"`{name}` has inputs that are not finite on the calibration data", hint="does the float model answer?")
    return largest


def _balanced(
    runner: LayerRunner,
    i: int,
    leaves: Leaves,
    statistics: dict[str, InputStatistics],
    method: RoundingMethod,
    batch: tuple[Any, Any],
) -> tuple[Leaves, dict[str, np.ndarray]]:
    """Balances the weights of a layer, if the method does so. Returns the changed weights, and the scales of the inputs of
    contractions. `statistics` is changed in place to that of the scaled inputs."""
    changed: Leaves = {}
    scales: dict[str, np.ndarray] = {}
    if not isinstance(method, BalancingMethod):
        return changed, scales
    block, contractions = runner.block(i), runner.contractions(i)
    for pair in runner.balanced_pairs(i, leaves, *batch):
        now = leaves | changed
        names = [name for name in pair.readers if name in statistics and statistics[name].sufficient.any()]
        if not names:
            continue
        reader_contractions = {name: runner.contraction(i, name) for name in names}
        readers = [BalancedReader(of, now[f"{name}.w"], of.scheme, statistics[name]) for name, of in reader_contractions.items()]
        source = contractions.get(pair.source)
        s = method.channel_scales(pair, readers, source.sizes[source.group] if source is not None and source.group else 1)
        changed |= fold_scales(block, now, contractions, pair, s)
        for name in names:
            scales[name] = reader_scales(contractions[name], pair, s)
            statistics[name] = divided_inputs(statistics[name], scales[name])
    return changed, scales


def _round(
    of: QuantizedEinsum,
    w: Any,
    method: RoundingMethod,
    inputs: InputStatistics | None,
    original: tuple[Any, np.ndarray | None],
) -> tuple[Quantized, Row]:
    """Quantizes a weight. Returns it with its results on the data.

    Args:
        original: the weight before balancing, and the scales of its inputs (None if they were not scaled).
    """
    usable = None if inputs is None or not inputs.sufficient.any() else inputs
    quantized = method.quantize(of, w, of.scheme, usable)
    # Computed in numpy, for the reason in `output_error`.
    rounded, exact = np.asarray(as_floats(quantized)), np.asarray(w)
    size = float(np.linalg.norm(exact.ravel()))
    row: Row = {"error": float(np.linalg.norm((rounded - exact).ravel())) / size if size else 0.0}
    if inputs is None:
        return quantized, row | {"output_error": None, "nearest_error": None, "uncalibrated": 1.0}
    before, scales = original
    plain = inputs if scales is None else divided_inputs(inputs, 1 / scales)
    nearest = output_error(of, before, as_floats(of.scheme.quantize(of, before)), plain)
    row |= {"output_error": output_error(of, w, rounded, inputs), "nearest_error": nearest}
    return quantized, row | {"uncalibrated": float(1 - inputs.sufficient.mean())}
