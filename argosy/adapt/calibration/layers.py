"""Runs a model one layer at a time for calibration, on the outputs of the previous layers. The weights of a layer are read when it
runs, so the whole model is never in memory.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from argosy.adapt.calibration.statistics import InputStatistics, InputSums, ObservedContraction, StatisticsRecorder
from argosy.adapt.methods.balance import BalancedPair, candidate_pairs, fold_scales, is_same, random_scales, source_size
from argosy.adapt.quant import PARTS, QuantizedEinsum, Scheme, apply_schemes, quantized_einsum
from argosy.adapt.surgery import at, find, put_at
from argosy.core.formats import TensorReader
from argosy.models.parts.attention.attend import Attend, Bidirectional, Packed
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import Layer, Unroll, run_block
from argosy.models.parts.weight import Leaves, merge, split, variables
from argosy.ops.quantized import Quantized

# The prefixes of modules that come after the layers.
AFTER = ("head.", "norm.", "pooler.", "mtp.")
# The name of the embedding of tokens.
EMBED = "embed.w"


class LayerRunner:
    """Runs the layers of a model whose weights are on disk.

    Args:
        config: the config of the model.
        weights: reads the weights of the unquantized model, by per-layer name.
        schemes: the scheme of each contraction that is quantized, by per-layer name.
    """

    def __init__(self, config: Any, weights: TensorReader, schemes: Mapping[str, Scheme]):
        self.weights, self.causal = weights, config.causal
        self.plain, self.rounded = config.build(Unroll()), config.build(Unroll())
        apply_schemes(self.rounded, schemes)
        self.plan: tuple[Layer, ...] = self.plain.layers.plan
        self._pairs: dict[Any, list[BalancedPair]] = {}
        self.names = [tuple(self._names(i, schemes)) for i in range(len(self.plan))]

    def _names(self, i: int, schemes: Mapping[str, Scheme]) -> list[str]:
        """Returns the names, within the layer, of the contractions that are quantized."""
        return [name for name in find(self.block(i), ".*") if f"layers.{i}.{name}" in schemes]

    def contraction(self, i: int, name: str) -> QuantizedEinsum:
        """Returns a quantized contraction of a layer, with shapes in place of weights."""
        return at(getattr(self.rounded.layers, str(i)), name)

    def read(self, i: int) -> Leaves:
        """Reads the weights of a layer as float32, by their names within the layer."""
        by_address = variables(self.block(i))
        return {name: jnp.asarray(self.weights.read(f"layers.{i}.{name}"), jnp.float32) for name in by_address}

    def embedded(self, batches: Iterator[tuple[Any, Any]]) -> Iterator[np.ndarray]:
        """Yields the inputs of the first layer for each batch.

        Args:
            batches: yields tokens [B T] and segments [B T].
        """
        # A separate model, because arrays that are put into variables of `plain` would stay in memory.
        graph, state = split(self.plain)
        inside = [a for a in state if not a.startswith(("layers.", *AFTER))]
        pairs = list(batches)
        # Only the rows of the embedding that the data reads are copied, because all rows are half of a small model.
        ids = np.unique(np.concatenate([np.ravel(tokens) for tokens, _ in pairs]))
        read = {a: self.weights.read(a) if a != EMBED else self.weights.read(a)[ids] for a in inside}
        model = merge(graph, state | {a: jnp.asarray(w, jnp.float32) for a, w in read.items()})
        for tokens, segments in pairs:
            rows = jnp.asarray(np.searchsorted(ids, tokens), jnp.int32)
            yield np.asarray(model.embedded(rows, _strategy(self.causal, jnp.asarray(segments))))

    def statistics(self, i: int, leaves: Leaves, batches: Iterator[tuple[Any, Any]]) -> dict[str, InputStatistics]:
        """Computes statistics of the inputs of each contraction of layer `i` that is quantized, by name within the layer.

        Args:
            leaves: the weights of the layer, by name within the layer.
            batches: yields inputs of the layer [B T D] and segments [B T], at least once.
        """
        graph, _ = split(self.block(i))
        places, run = _observed(graph, self.plan[i], self.names[i], self.causal)
        sums: list[InputSums] | None = None
        for x, segments in batches:
            if sums is None:
                shapes = jax.eval_shape(run, leaves, x, segments, None)
                sums = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
            sums = run(leaves, x, segments, sums)
        assert sums is not None
        statistics = [InputStatistics.of(input_sums) for input_sums in sums]
        return {name: statistics[places[name]] for name in self.names[i] if name in places}

    def contractions(self, i: int) -> dict[str, Contraction]:
        """Returns all contractions of a layer by name within the layer, with shapes in place of weights. They include those whose
        output only selects something."""
        modules = nnx.iter_modules(self.block(i))
        return {".".join(map(str, path)): module for path, module in modules if isinstance(module, Contraction)}

    def block(self, i: int) -> Any:
        """Returns a layer of the unquantized model, with shapes in place of weights."""
        return getattr(self.plain.layers, str(i))

    def balanced_pairs(self, i: int, leaves: Leaves, x: Any, segments: Any) -> list[BalancedPair]:
        """Returns the pairs of a layer that can be balanced, because scaling them at random changes the output of the layer on these
        inputs only by rounding. Layers of the same structure are tested once.
        """
        block, contractions = self.block(i), self.contractions(i)
        graph, _ = split(block)
        if (kind := (graph, self.plan[i])) not in self._pairs:
            run = _layer(graph, self.plan[i], self.causal)
            exact, pairs = run(leaves, x, segments), list[BalancedPair]()
            for pair in candidate_pairs(block, contractions):
                s = random_scales(contractions.get(pair.source), source_size(pair, contractions))
                if is_same(exact, run(leaves | fold_scales(block, leaves, contractions, pair, s), x, segments)):
                    pairs.append(pair)
            self._pairs[kind] = pairs
        return self._pairs[kind]

    def outputs(self, i: int, leaves: Leaves, quantized: Mapping[str, Quantized], x: Any, segments: Any) -> np.ndarray:
        """Computes the output of a layer with quantized weights.

        Args:
            leaves, quantized: the float weights and the quantized weights of the layer, by name within the layer.
        """
        graph, state = split(getattr(self.rounded.layers, str(i)))
        weights = {a: leaves[a] for a in state if a in leaves}
        for name, w in quantized.items():
            weights |= {a: getattr(w, a.removeprefix(f"{name}.")) for a in state if a.startswith(f"{name}.") and a not in leaves}
        return np.asarray(_layer(graph, self.plan[i], self.causal)(weights, x, segments))

    def rounded_output(self, i: int, leaves: Leaves, schemes: Mapping[str, Scheme], x: Array, segments: Array) -> Array:
        """Computes the output of a layer in which some matrices are rounded to nearest.

        Args:
            schemes: the schemes of the rounded matrices, by their names within the layer.
        """
        block, weights = self.block(i), dict(leaves)
        contractions = self.contractions(i) if schemes else {}
        if any(scheme.activations is not None for scheme in schemes.values()):
            block = nnx.merge(*nnx.split(block))
        for name, scheme in schemes.items():
            w = scheme.quantize(contractions[name], weights.pop(f"{name}.w"))
            if scheme.activations is None:
                # Dequantized weights give the same numbers in the program of the plain layer, which is compiled once.
                weights[f"{name}.w"] = w.dequantized()
                continue
            put_at(block, name, quantized_einsum(at(block, name), scheme))
            weights |= {f"{name}.{part}": array for part in PARTS if (array := getattr(w, part)) is not None}
        return _layer(split(block)[0], self.plan[i], self.causal)(weights, x, segments)


def _strategy(causal: bool, segments: Array) -> Attend:
    # Latent attention expands its latents, so that every weight is contracted by its own equation.
    return Packed(segments, absorb=False) if causal else Bidirectional(segments)


@lru_cache(maxsize=64)
def _observed(graph: Any, layer: Layer, names: tuple[str, ...], causal: bool) -> tuple[dict[str, int], Any]:
    """Returns a program that sums statistics over the inputs of contractions, and the index of each contraction's sums in its outputs,
    which is filled when the program is traced."""
    places: dict[str, int] = {}

    @partial(jax.jit, donate_argnums=3)
    def run(weights: Leaves, x: Array, segments: Array, before: list[InputSums] | None) -> list[InputSums]:
        block, attend = merge(graph, weights), _strategy(causal, segments)
        recorder = StatisticsRecorder(attend.live)
        for name in names:
            put_at(block, name, ObservedContraction(at(block, name), name, recorder))
        block(x, layer.each, None, attend, None)
        places.update(recorder.places)
        return recorder.sums if before is None else [a.added(b) for a, b in zip(before, recorder.sums, strict=True)]

    return places, run


@lru_cache(maxsize=64)
def _layer(graph: Any, layer: Layer, causal: bool) -> Any:
    """Returns a compiled program (weights, x, segments) -> x that runs a layer."""

    @jax.jit
    def run(weights: Leaves, x: Array, segments: Array) -> Array:
        return run_block(graph, layer, weights, x, None, _strategy(causal, segments), "none", unrolled=True)[0]

    return run
