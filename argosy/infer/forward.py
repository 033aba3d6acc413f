"""The forward pass of an engine's step: ragged rows in, logits of the tokens that are sampled after out.

    Whole      one program; for accelerators, and for weights on several devices
    ByLayer    one program for each kind of layer, called layer by layer; for a CPU

XLA:CPU compiles a program in time proportional to its layers (`infer.layers`), and runs a scan over stacked layers at half the speed,
because it copies each layer's slice. So `ByLayer` takes layers of stacked weights as views (`infer.views`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from argosy.infer.layers import Layers, model_of
from argosy.infer.views import Views, viewable
from argosy.models.parts.attend import Attend, Paged
from argosy.models.parts.cache import Caches, Specs, laid_out
from argosy.models.parts.ragged import Ragged
from argosy.models.parts.weight import Leaves, split
from argosy.parallel.scope import axis_sizes


class Sizes(NamedTuple):
    """The sizes that a step is compiled for: decoding rows, prompt rows, tokens per prompt row, pages per sequence."""

    decodes: int
    rows: int
    width: int
    pages: int

    @property
    def words(self) -> int:
        """Length of the array that describes a step."""
        return self.decodes * (2 + self.pages) + self.rows * (3 + self.pages + self.width)

    @property
    def tokens(self) -> int:
        return self.decodes + self.rows * self.width


def cut(words: Any, sizes: Sizes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a step within its `words`, for decoding rows and for prompt rows: views, if `words` is a NumPy array."""
    D, Q, T, P = sizes
    at = 0

    def take(*shape: int) -> Any:
        nonlocal at
        size = int(np.prod(shape))
        part = words[at : at + size].reshape(shape)
        at += size
        return part

    decodes = {"slot": take(D), "length": take(D), "table": take(D, P)}
    rows = {"slot": take(Q), "length": take(Q), "new": take(Q), "table": take(Q, P), "tokens": take(Q, T)}
    return decodes, rows


# The logits after the picked tokens, and the caches.
Passed = tuple[Float[Array, "B V"], Caches]


@runtime_checkable
class Forward(Protocol):
    """The forward pass of one model. specs: of the caches that it reads and writes, in place."""

    specs: Specs

    def prepared(self, weights: Leaves) -> Any:
        """The model's weights as the programs take them."""
        ...

    def __call__(
        self, weights: Any, caches: Caches, last: Int[Array, "N"], words: Any, picks: Any, sizes: Sizes
    ) -> Passed:
        """One step.

        Args:
            weights: from `prepared`.
            last: the token sampled last in each slot, which a decoding row computes.
            words: the step, as in `cut`.
            picks: places of the tokens whose logits are wanted: decoding rows come first, then prompts row by row.
        """
        ...


def forward_of(model: Any, weights: Leaves) -> Forward:
    """The forward pass for where these weights are."""
    return ByLayer(model) if viewable(weights) else Whole(model)


class Whole:
    """The forward pass as one program."""

    def __init__(self, model: Any):
        self.specs: Specs = model.layers.holds()
        self._program = _whole(split(model)[0], model.dtype)

    def prepared(self, weights: Leaves) -> Leaves:
        return weights

    def __call__(self, weights: Leaves, caches: Caches, last: Array, words: Any, picks: Any, sizes: Sizes) -> Passed:
        return self._program(weights, caches, last, words, picks, sizes)


class ByLayer:
    """The forward pass as programs of its parts: before the layers, each kind of layer, after the layers."""

    def __init__(self, model: Any):
        self.views = Views(model) if model.layers.run.stacked else None
        model = model if self.views is None else self.views.model
        self.specs: Specs = model.layers.holds()
        self.layers = Layers(model)
        self._before, self._after = _before(*self.layers.outside), _after(*self.layers.outside)

    def prepared(self, weights: Leaves) -> tuple[Leaves, list[Leaves]]:
        return self.layers.prepared(weights if self.views is None else self.views.of(weights))

    def __call__(
        self, weights: tuple[Leaves, Sequence[Leaves]], caches: Caches, last: Array, words: Any, picks: Any, sizes: Sizes
    ) -> Passed:
        outside, layers = weights
        x, attend = self._before(outside, last, words, sizes)
        x, kept = self.layers(layers, x, caches, attend)
        return self._after(outside, x, picks), kept


# ---------------------------------------------------------------- programs


def _read(last: Array, words: Array, sizes: Sizes) -> tuple[Int[Array, "B T"], Ragged]:
    """The tokens of a step [1 tokens], and its strategy."""
    d, c = cut(words, sizes)
    groups, flat = [], []
    if sizes.decodes:
        live = (d["slot"] >= 0).astype(jnp.int32)
        groups.append(Paged(d["table"], d["slot"], d["length"], live, _counting(sizes.decodes, 1)))
        flat.append(jnp.take(last, d["slot"], mode="clip"))
    if sizes.rows:
        groups.append(Paged(c["table"], c["slot"], c["length"], c["new"], _counting(sizes.rows, sizes.width)))
        flat.append(c["tokens"].reshape(-1))
    return jnp.concatenate(flat)[None], Ragged(tuple(groups))


def _counting(rows: int, width: int) -> Int[Array, "B T"]:
    return jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))


@lru_cache(maxsize=16)
def _whole(graph: Any, dtype: Any) -> Any:
    """(weights, caches, last, words, picks, Sizes) -> (logits, caches)."""

    def whole(weights: Leaves, caches: Caches, last: Array, words: Array, picks: Array, sizes: Sizes) -> Passed:
        model = model_of(graph, weights, dtype)
        specs = model.layers.holds()
        x, caches, _ = model.hidden(*_read(last, words, sizes), caches)
        logits = model.unembed(x[:, picks])[0]
        if max(axis_sizes().values(), default=1) > 1:
            # In each step as before it, or XLA might choose others and the next step would compile again.
            caches = laid_out(specs, caches)
            logits = jax.lax.with_sharding_constraint(logits, PartitionSpec())
        return logits, caches

    return jax.jit(whole, donate_argnums=1, static_argnums=5)


@lru_cache(maxsize=16)
def _before(graph: Any, dtype: Any, absent: Any) -> Any:
    """(weights outside the layers, last, words, Sizes) -> (input of the layers, strategy)."""

    def before(outside: Leaves, last: Array, words: Array, sizes: Sizes) -> tuple[Array, Attend]:
        model = model_of(graph, outside, dtype, absent)
        tokens, attend = _read(last, words, sizes)
        return model.embedded(tokens, attend), model.layers.with_angles(attend)

    return jax.jit(before, static_argnums=3)


@lru_cache(maxsize=16)
def _after(graph: Any, dtype: Any, absent: Any) -> Any:
    """(weights outside the layers, output of the layers, picks) -> logits."""

    def after(outside: Leaves, x: Array, picks: Array) -> Array:
        model = model_of(graph, outside, dtype, absent)
        return model.unembed(model.norm(x[:, picks]))[0]

    return jax.jit(after)
