"""The forward pass of one model, over the rows of an engine's step or over whole sequences.

    OneProgram   compiles the whole model: for accelerators, for weights on several devices, and for scanned layers
    ByLayer      compiles up to four layers at a time: for a CPU

Two functions define a kind of pass (`PassKind`): one makes the model's inputs from arrays, the other makes arrays from the last hidden
states. The layers between them, and their programs, are the same for all kinds.

XLA:CPU compiles a program in time proportional to its layers, except that three layers with kernels (`ops.native`) compile as fast as
one. SmolLM2 135M compiles in 2.5 CPU seconds by layer, and in 10 to 14 as a whole. With several layers in a program, a step of one row
calls 12 programs instead of 32, and takes 14.4 ms instead of 16.0. XLA:CPU runs a scan over stacked layers at half the speed, because
it copies each layer's slice. So steps on a CPU run stacked layers unrolled, over views of their weights (`infer.cpu.views`).

With adapters (`infer.engine.adapters`), these programs run a model with banks on its contractions. The adapters' factors, and the
place of each token's adapter, are further weights of this model.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from argosy.infer.cpu.prepare import WeightPreparation
from argosy.infer.cpu.views import is_on_one_cpu
from argosy.infer.forward.layers import AbsentWeights, LayerPrograms, traced_model
from argosy.infer.forward.step import StepSizes, read_overlaid_step, read_step, split_words
from argosy.infer.sampling.sampler import SamplerFeatures, SamplerOutput, Slots, sample_rows
from argosy.models.parts.attention.attend import Attend
from argosy.models.parts.attention.cache import Caches, Specs, constrain_caches
from argosy.models.parts.inputs import as_inputs
from argosy.models.parts.weight import Leaves, split
from argosy.ops.programs.programs import Program, RunProgram, run_jitted
from argosy.parallel.scope import on_several_devices

if TYPE_CHECKING:
    from argosy.infer.engine.adapters import Adapters

# The most layers of one program of a step.
TOGETHER = 4

# (model, last hidden states [B T D] after the norm, further arrays) -> arrays.
Tail = Callable[..., Any]


class PassKind(NamedTuple):
    """The functions before and after the layers of a forward pass. They are keys of compiled programs, so they must be functions of a
    module, not closures.

    entry: (arrays ..., sizes) -> (token ids or `Inputs`, attention strategy). `sizes` is static: the entry is compiled for it.
    tail: (model, last hidden states, further arrays ...) -> results.
    """

    entry: Callable[..., tuple[Any, Attend]]
    tail: Tail


class StepOutput(NamedTuple):
    """The results of a step.

    logits: the logits at the picked tokens.
    caches: the updated caches.
    hidden: the hidden states of every token before the head; None unless the forward pass was built with `hidden=True`.
    """

    logits: Float[Array, "B V"]
    caches: Caches
    hidden: Float[Array, "1 tokens D"] | None = None


def whole_sequences(tokens: Any, attend: Attend, sizes: None) -> tuple[Any, Attend]:
    """The entry (`PassKind`) of a pass over whole sequences."""
    return tokens, attend


def step_logits(model: Any, x: Array, picks: Array) -> tuple[Array, None]:
    """The tail of a step: the logits at its picked tokens."""
    return replicate(model.unembed(x[:, picks])[0]), None


def step_logits_and_hidden(model: Any, x: Array, picks: Array) -> tuple[Array, Array]:
    """The tail of a step: the logits at its picked tokens, and the hidden states of every token before the head."""
    return replicate(model.unembed(x[:, picks])[0]), replicate(x)


def replicate(a: Array) -> Array:
    """Constrains an array to be replicated on every device. Otherwise XLA might choose another sharding for the results of a step, and
    the next step would compile again."""
    return jax.lax.with_sharding_constraint(a, PartitionSpec()) if on_several_devices() else a


class Forward:
    """The forward pass of one model. Its subclasses `OneProgram` and `ByLayer` compile it.

    Args:
        adapters: the adapters that tokens may use; None: the model alone.
        run: calls its programs (`ops.programs.programs`).
        hidden: whether a step also returns the hidden states of every token before the head.
        preparation: prepares the weights for the programs; None: they are used unchanged.

    specs: the specs of the caches, which a pass updates in place.
    """

    def __init__(
        self,
        model: Any,
        adapters: "Adapters | None" = None,
        *,
        run: RunProgram = run_jitted,
        hidden: bool = False,
        preparation: WeightPreparation | None = None,
    ):
        self.preparation = preparation or WeightPreparation(model)
        self.adapters, self.run = adapters, run
        plain = self.preparation.model
        self.model = plain if adapters is None else adapters.on(plain)
        self.specs: Specs = self.model.layers.holds()
        self.step_kind = PassKind(read_step, step_logits_and_hidden if hidden else step_logits)

    def prepared(self, weights: Leaves) -> Any:
        """Prepares weights for the programs. May remove entries from `weights`, to free their memory."""
        weights = self.preparation(weights)
        if self.adapters is not None:
            weights = {address: weights[base] for address, base in self.adapters.base.items()}
        return self._divided(weights)

    def forget(self) -> None:
        """Frees the packed weights that `prepared` keeps between calls. Called when the weights have changed."""
        self.preparation.forget()

    def step(
        self, weights: Any, caches: Caches, last: Any, words: Any, picks: Any, sizes: StepSizes, embeddings: Any = None
    ) -> StepOutput:
        """Runs one step. While programs are compiled ahead of time (`Programs.ahead`), arrays may be descriptions.

        Args:
            weights: the weights from `prepared`.
            caches: the caches, which are updated in place.
            last: the token sampled last in each slot [N], which a decoding row computes.
            words: the arrays of all rows, as `step.split_words` reads them.
            picks: indices of the tokens whose logits are computed. Tokens are counted over decoding rows, then drafted rows, then
                prompt rows, each row by row.
            embeddings: the embeddings of prompt tokens, as in `step.read_overlaid_step`; None: every token has that of its id.
        """
        extra = {} if self.adapters is None else self.adapters.step_leaves(words, picks, sizes)
        kind, inputs = self.step_kind, (last, words)
        if embeddings is not None:
            kind, inputs = kind._replace(entry=read_overlaid_step), (last, words, embeddings)
        (logits, hidden), after = self(kind, weights, inputs, caches, (picks,), sizes=sizes, extra=extra)
        assert after is not None
        return StepOutput(logits, after, hidden)

    def __call__(
        self,
        kind: PassKind,
        weights: Any,
        inputs: tuple[Any, ...],
        caches: Caches | None,
        more: tuple[Any, ...] = (),
        *,
        sizes: Any = None,
        extra: Leaves | None = None,
    ) -> tuple[Any, Caches | None]:
        """Runs a pass. Returns the results of its tail, and the caches, which are updated in place.

        Args:
            weights: the weights from `prepared`.
            inputs: the arrays that the entry reads.
            more: the further arrays that the tail reads.
            sizes: the last argument of the entry.
            extra: further weights by parameter name: the factors of adapters, and the place of each token's adapter.
        """
        raise NotImplementedError

    def _divided(self, weights: Leaves) -> Any:
        return weights


class OneProgram(Forward):
    """The forward pass as one program."""

    def __init__(self, model: Any, adapters: "Adapters | None" = None, **options: Any):
        super().__init__(model, adapters, **options)
        self._graph = split(self.model)[0]
        self._programs: dict[PassKind, Program] = {}
        self._several = _several_steps(self._graph, self.model.dtype)

    def program(self, kind: PassKind) -> Program:
        """(weights, caches, inputs, further arrays, sizes) -> (results, caches)."""
        if kind not in self._programs:
            self._programs[kind] = _one_program(self._graph, self.model.dtype, kind)
        return self._programs[kind]

    def __call__(
        self,
        kind: PassKind,
        weights: Leaves,
        inputs: tuple[Any, ...],
        caches: Caches | None,
        more: tuple[Any, ...] = (),
        *,
        sizes: Any = None,
        extra: Leaves | None = None,
    ) -> tuple[Any, Caches | None]:
        weights = weights | extra if extra else weights
        return self.run(self.program(kind), (sizes, _shapes(more)), weights, caches, inputs, more, sizes)

    def several(
        self,
        weights: Leaves,
        caches: Caches,
        slots: Slots,
        words: Any,
        picks: Any,
        owners: Any,
        sizes: StepSizes,
        features: SamplerFeatures,
    ) -> tuple[Slots, Caches, SamplerOutput]:
        """Runs several decode steps, each with the sampler, in one program. Returns the sampler's state, the caches, and the sampled
        tokens as arrays [steps B ...].

        Args:
            slots: the sampler's state.
            picks: indices of the decoding rows that are sampled.
            owners, features: as in `sampler.sample_rows`.
        """
        if self.adapters is not None:
            weights = weights | self.adapters.step_leaves(words, picks, sizes)
        at = sizes, features, len(picks)
        return self.run(self._several, at, weights, caches, slots, words, picks, owners, (sizes, features))


class ByLayer(Forward):
    """The forward pass as several programs: one before the layers, one for each kind of run of layers, and one after the layers.

    Args:
        together: the most layers of one program.
    """

    def __init__(self, model: Any, adapters: "Adapters | None" = None, *, together: int = TOGETHER, **options: Any):
        super().__init__(model, adapters, **options)
        self.layers = LayerPrograms(self.model, together)
        self._programs: dict[Any, Program] = {}

    def __call__(
        self,
        kind: PassKind,
        weights: tuple[Leaves, list[Leaves]],
        inputs: tuple[Any, ...],
        caches: Caches | None,
        more: tuple[Any, ...] = (),
        *,
        sizes: Any = None,
        extra: Leaves | None = None,
    ) -> tuple[Any, Caches | None]:
        outside, layers = weights
        if extra:
            added = self.layers.divided(extra)
            outside, layers = outside | added[0], [layer_weights | leaves for layer_weights, leaves in zip(layers, added[1])]
        x, attend = self.run(self._program(_before, kind.entry), sizes, outside, inputs, sizes)
        at = sizes.text if isinstance(sizes, StepSizes) else sizes
        x, after = self.layers(layers, x, caches or {}, attend, self.run, at)
        out = self.run(self._program(_after, kind.tail), (x.shape, _shapes(more)), outside, x, more)
        return out, caches and after

    def _divided(self, weights: Leaves) -> tuple[Leaves, list[Leaves]]:
        return self.layers.divided(weights)

    def _program(self, make: Callable[..., Program], function: Any) -> Program:
        if function not in self._programs:
            self._programs[function] = make(*self.layers.outside, function)
        return self._programs[function]


def forward_of(
    model: Any,
    weights: Leaves,
    adapters: "Adapters | None" = None,
    *,
    whole: bool = False,
    replace: Any = None,
    origin: Any = None,
    activations: str | None = None,
    **options: Any,
) -> Forward:
    """Builds the forward pass of an engine: by layer if all weights are on one CPU, else as one program.

    Args:
        whole: whether it is one program in any case.
        replace, origin, activations: as in `WeightPreparation`.
        options: further arguments of `Forward`.
    """
    if whole or not is_on_one_cpu(weights):
        return OneProgram(model, adapters, **options)
    weight_options: Any = {"replace": replace, "origin": origin, "activations": activations}
    prepares = WeightPreparation(model, views=model.layers.run.stacked, panels=True, **weight_options)
    return ByLayer(model, adapters, preparation=prepares, **options)


# ---------------------------------------------------------------- programs


def _shapes(arrays: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(np.shape(a) for a in arrays)


@lru_cache(maxsize=64)
def _one_program(graph: Any, dtype: Any, kind: PassKind) -> Program:
    """(weights, caches, inputs, further arrays, sizes) -> (results, caches)."""

    def one_program(weights: Leaves, caches: Any, inputs: Any, more: Any, sizes: Any) -> Any:
        model = traced_model(graph, weights, dtype)
        x, caches, _ = model.hidden(*kind.entry(*inputs, sizes), caches)
        if caches is not None and on_several_devices():
            # Otherwise XLA might choose another sharding for the caches, and the next pass would compile again.
            caches = constrain_caches(model.layers.holds(), caches)
        return kind.tail(model, x, *more), caches

    return Program(one_program, donate=1, static=4)


@lru_cache(maxsize=16)
def _several_steps(graph: Any, dtype: Any) -> Program:
    """(weights, caches, sampler's state, words, picks, owners, (sizes, features)) -> (sampler's state, caches, `SamplerOutput`)."""

    def several_steps(
        weights: Leaves,
        caches: Caches,
        slots: Slots,
        words: Array,
        picks: Array,
        owners: Array,
        sizes_and_features: tuple[StepSizes, SamplerFeatures],
    ) -> tuple[Slots, Caches, SamplerOutput]:
        sizes, features = sizes_and_features
        model = traced_model(graph, weights, dtype)
        specs, steps = model.layers.holds(), split_words(words, sizes)[0]["steps"]

        def one_step(state: tuple[Slots, Caches], step: Array) -> Any:
            slots, caches = state
            x, caches, _ = model.hidden(*read_step(slots.last, words, sizes, step), caches)
            logits, _ = step_logits(model, x, picks)
            if on_several_devices():
                caches = constrain_caches(specs, caches)
            slots, out = sample_rows(slots, logits, jnp.where(step < steps[picks], owners, -1), features)
            return (slots, caches), out

        (slots, caches), out = jax.lax.scan(one_step, (slots, caches), jnp.arange(sizes.steps, dtype=jnp.int32))
        return slots, caches, out

    return Program(several_steps, donate=(1, 2), static=6)


@lru_cache(maxsize=64)
def _before(graph: Any, dtype: Any, absent: AbsentWeights, entry: Any) -> Program:
    """(weights outside the layers, inputs, sizes) -> (input of the layers, strategy)."""

    def before(outside: Leaves, inputs: Any, sizes: Any) -> tuple[Array, Attend]:
        model = traced_model(graph, outside, dtype, absent)
        tokens, attend = entry(*inputs, sizes)
        return model.embedded(tokens, attend), model.layers.with_angles(attend, as_inputs(tokens).positions)

    return Program(before, static=2)


@lru_cache(maxsize=64)
def _after(graph: Any, dtype: Any, absent: AbsentWeights, tail: Tail) -> Program:
    """(weights outside the layers, output of the layers, further arrays) -> results."""

    def after(outside: Leaves, x: Array, more: Any) -> Any:
        model = traced_model(graph, outside, dtype, absent)
        return tail(model, model.norm(x), *more)

    return Program(after)
