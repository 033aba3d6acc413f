"""Measures how much the next-token distribution of a model changes when one matrix is rounded, for every preset that may be chosen.

    KL(p, q) = mean over tokens of sum p log(p / q),     p of the float model, q of the model in which one matrix is rounded

The inputs of layer i are those of the float model, whatever is rounded in layer i or later. So they are computed once, and each
measurement runs only the layers from i on, which are half of the model on average. The weights of the model are in memory, with the
inputs of one layer and of the head for all data. Logits are computed for a few tokens at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.adapt.calibration.calibrate import BATCH
from argosy.adapt.calibration.data import CalibrationData
from argosy.adapt.calibration.layers import AFTER, LayerRunner
from argosy.adapt.quant import Scheme
from argosy.adapt.search.measured import MeasuredDivergences
from argosy.core.errors import BadInput
from argosy.models.parts.weight import Leaves, merge, split
from argosy.ops.divergence import forward, log_probs

# The number of tokens whose logits are in memory at a time.
LOGITS = 256


class SensitivityMeter:
    """Measures the divergence of a model with rounded matrices from the float model, on data.

    Args:
        runner: runs the layers of the float model.
        data: the sequences on which the divergence is measured.
    """

    def __init__(self, runner: LayerRunner, data: CalibrationData):
        self.runner, self.data = runner, data
        self.leaves = [runner.read(i) for i in range(len(runner.plan))]
        for i, leaves in enumerate(self.leaves):
            for name, w in leaves.items():
                if not bool(jnp.isfinite(w).all()):
                    problem = f"`layers.{i}.{name}` has numbers that are not finite"
                    raise BadInput(problem, hint="is the source damaged? copy or download it again")
        rows = max(1, BATCH // data.tokens.shape[1])
        parts = [slice(at, at + rows) for at in range(0, len(data.tokens), rows)]
        self.segments = [jnp.asarray(data.segments[part]) for part in parts]
        pairs = zip((data.tokens[part] for part in parts), self.segments, strict=True)
        self.inputs = [jnp.asarray(x) for x in runner.embedded(pairs)]
        self._graph, self._head, self._divergence = _head(runner)
        self.exact = [self._outputs_from(0, x, {}, segments) for x, segments in zip(self.inputs, self.segments, strict=True)]

    def _outputs_from(self, i: int, x: Array, schemes: Mapping[str, Scheme], segments: Array) -> Array:
        """Computes the output of the last layer from the input of layer i, with some matrices rounded."""
        for at in range(i, len(self.leaves)):
            layer_schemes = {
                name.removeprefix(f"layers.{at}."): scheme for name, scheme in schemes.items() if name.startswith(f"layers.{at}.")
            }
            x = self.runner.rounded_output(at, self.leaves[at], layer_schemes, x, segments)
        return x

    def divergence(self, schemes: Mapping[str, Scheme], i: int = 0, inputs: Sequence[Array] | None = None) -> float:
        """Returns the mean KL of the next token, in nats, with some matrices rounded to nearest.

        Args:
            schemes: the scheme of each rounded matrix, by per-layer name.
            i: the index of the first layer with rounded matrices.
            inputs: the inputs of that layer. The default is the inputs of the first layer.
        """
        total = 0.0
        for x, exact, segments in zip(inputs or self.inputs, self.exact, self.segments, strict=True):
            rounded = self._outputs_from(i, x, schemes, segments)
            total += float(self._divergence(self._head, exact, rounded, segments))
        return total / self.data.size

    def sensitivities(
        self,
        schemes: Mapping[str, Scheme],
        done: Callable[[int, int], None] = lambda layers, all: None,
        measured: MeasuredDivergences | None = None,
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields (per-layer name, {preset: divergence}) for each matrix.

        Args:
            schemes: the scheme of each preset, by its name.
            done: called with the number of finished layers and the number of all layers.
            measured: the measurements of an earlier process, to which new ones are added.
        """
        inputs = self.inputs

        def rounding(name: str, preset: str, i: int) -> float:
            if measured is not None and (before := measured.get(name, preset)) is not None:
                return before
            divergence = self.divergence({name: schemes[preset]}, i, inputs)
            if measured is not None:
                measured.add(name, preset, divergence)
            return divergence

        for i, names in enumerate(self.runner.names):
            for name in (f"layers.{i}.{name}" for name in names):
                yield name, {preset: rounding(name, preset, i) for preset in schemes}
            pairs = zip(inputs, self.segments, strict=True)
            inputs = [self.runner.rounded_output(i, self.leaves[i], {}, x, segments) for x, segments in pairs]
            done(i + 1, len(self.runner.plan))


def _head(runner: LayerRunner) -> tuple[Any, Leaves, Any]:
    """Returns the model without its layers, its weights, and a program (weights, exact, rounded, segments) -> the sum of KL over
    tokens."""
    graph, all_weights = split(runner.plain)
    outside = ("layers.", *(name for name in AFTER if name not in ("head.", "norm.")))
    inside = [name for name in all_weights if not name.startswith(outside)]
    weights: Leaves = {name: jnp.asarray(runner.weights.read(name), jnp.float32) for name in inside}
    # The other weights stay descriptions, because nothing here reads them.
    descriptions = {name: w for name, w in all_weights.items() if name not in weights}

    @jax.jit
    def run(weights: Leaves, exact: Float[Array, "B T D"], rounded: Float[Array, "B T D"], segments: Int[Array, "B T"]) -> Array:
        model = merge(graph, descriptions | weights)

        def divergence(parts: tuple[Array, Array, Array]) -> Array:
            p, q = (log_probs(model.unembed(model.norm(x[None])))[0] for x in parts[:2])
            return jnp.sum(jnp.where(parts[2] > 0, forward(q, p), 0.0))

        size = min(LOGITS, segments.size)
        rest = -segments.size % size
        flat = [x.reshape(-1, x.shape[-1]) for x in (exact, rounded)]
        flat = [jnp.pad(x, ((0, rest), (0, 0))).reshape(-1, size, x.shape[-1]) for x in flat]
        live = jnp.pad(segments.reshape(-1), (0, rest)).reshape(-1, size)
        return jnp.sum(jax.lax.map(divergence, (*flat, live)))

    return graph, weights, run


def bits_of(runner: LayerRunner, name: str, scheme: Scheme) -> tuple[int, int]:
    """Returns the bits of a matrix that is quantized by a scheme, including scales, and its number of weights."""
    layer, module = name.removeprefix("layers.").split(".", 1)
    of = runner.contractions(int(layer))[module]
    w: Any = jax.ShapeDtypeStruct(of.shape, np.float32)
    return 8 * jax.eval_shape(lambda w: scheme.quantize(of, w), w).nbytes, int(np.prod(of.shape))
