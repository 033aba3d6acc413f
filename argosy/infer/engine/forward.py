"""The forward pass of an engine's step: ragged rows in, logits of the tokens that are sampled after out.

    Whole      one program; for accelerators, and for weights on several devices
    ByLayer    programs of up to four layers; for a CPU

XLA:CPU compiles a program in time proportional to its layers (`infer.engine.layers`), but three layers with kernels (`ops.native`) as
fast as one; a step of one row of SmolLM2 135M, which then calls 12 programs instead of 32, takes 14.4 ms instead of 16.0. It runs a
scan over stacked layers at half the speed, because it copies each layer's slice. So `ByLayer` takes layers of stacked weights as views
(`infer.cpu.views`).

With adapters (`infer.engine.adapters`), the same programs run a model with banks on its contractions: the factors, and the adapter of
each token, are further weights of theirs.
"""

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from argosy.infer.cpu.panels import Replace, packs_of
from argosy.infer.cpu.views import Views, viewable
from argosy.infer.engine.layers import Layers, model_of
from argosy.infer.engine.programs import Program, Run, plainly
from argosy.infer.sampling.sampler import Sampled, Slots, sampled
from argosy.models.parts.attend import Attend, Paged
from argosy.models.parts.cache import AttentionWindow, Caches, Specs, laid_out
from argosy.models.parts.ragged import Ragged
from argosy.models.parts.weight import Leaves, split
from argosy.parallel.scope import on_several_devices
from argosy.weights.gguf.blocks import Origin

if TYPE_CHECKING:
    from argosy.infer.engine.adapters import Adapters


# Layers of a program, at most.
TOGETHER = 4


class Tables(NamedTuple):
    """The page tables of a sequence: pages of `page` tokens, at most `pages` of them, and beside them the tables of these windows."""

    page: int
    pages: int
    windows: tuple[AttentionWindow, ...] = ()


class Sizes(NamedTuple):
    """The sizes that a step is compiled for: decoding rows, prompt rows, tokens per prompt row, page tables; and with speculation,
    rows whose drafts are verified, and tokens per such row. steps: of decoding rows alone, one after the other."""

    decodes: int
    rows: int
    width: int
    tables: Tables
    drafted: int = 0
    ahead: int = 0
    steps: int = 1

    @property
    def words(self) -> int:
        """Length of the array that describes a step."""
        return sum(math.prod(shape) for part in shapes_of(self) for shape in part.values())

    @property
    def tokens(self) -> int:
        return self.decodes + self.drafted * self.ahead + self.rows * self.width


@cache
def shapes_of(sizes: Sizes) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Of the arrays of decoding rows, drafted rows and prompt rows, in the order of their tokens. `window0` is the table of the first
    window, from the page of number `first0` on; `steps` says how many of them each decoding row takes."""

    def part(B: int, width: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"slot": (B,), "length": (B,), "table": (B, sizes.tables.pages)}
        for i, window in enumerate(sizes.tables.windows):
            shapes |= {f"first{i}": (B,), f"window{i}": (B, window.pages(width, sizes.tables.page))}
        return shapes

    def wider(B: int, width: int) -> dict[str, tuple[int, ...]]:
        return part(B, width) | {"new": (B,), "tokens": (B, width)}

    decodes = part(sizes.decodes, sizes.steps) | ({"steps": (sizes.decodes,)} if sizes.steps > 1 else {})
    return decodes, wider(sizes.drafted, sizes.ahead), wider(sizes.rows, sizes.width)


def blank(sizes: Sizes) -> Int[np.ndarray, " words"]:
    """The array of a step whose rows belong to nobody."""
    words = np.zeros(sizes.words, np.int32)
    for part in cut(words, sizes):
        for name, a in part.items():
            if name.startswith(("slot", "table", "window")):
                a[:] = -1
    return words


def cut(words: Any, sizes: Sizes) -> tuple[dict[str, Any], ...]:
    """The arrays of a step within its `words`, for decoding rows, drafted rows and prompt rows, in the order of their tokens: views,
    if `words` is a NumPy array."""
    at = 0

    def take(shape: tuple[int, ...]) -> Any:
        nonlocal at
        size = math.prod(shape)
        part = words[at : at + size].reshape(shape)
        at += size
        return part

    return tuple({name: take(shape) for name, shape in part.items()} for part in shapes_of(sizes))


class Passed(NamedTuple):
    """The logits after the picked tokens, the caches, and if asked the input of the head at every token."""

    logits: Float[Array, "B V"]
    caches: Caches
    hidden: Float[Array, "1 tokens D"] | None = None


@runtime_checkable
class Forward(Protocol):
    """The forward pass of one model. specs: of the caches that it reads and writes, in place."""

    specs: Specs

    def prepared(self, weights: Leaves) -> Any:
        """The model's weights as the programs take them. May take some out of `weights`."""
        ...

    def forget(self) -> None:
        """Frees what `prepared` keeps for its next call, because the weights have changed."""
        ...

    def __call__(self, weights: Any, caches: Caches, last: Any, words: Any, picks: Any, sizes: Sizes) -> Passed:
        """One step. While programs are prepared (`infer.engine.programs`), of descriptions.

        Args:
            weights: from `prepared`.
            last: the token sampled last in each slot [N], which a decoding row computes.
            words: the step, as in `cut`.
            picks: places of the tokens whose logits are wanted: decoding rows come first, then drafted rows and prompts row by row.
        """
        ...


def forward_of(
    model: Any,
    weights: Leaves,
    adapters: "Adapters | None" = None,
    *,
    run: Run = plainly,
    hidden: bool = False,
    whole: bool = False,
    replace: Replace | None = None,
    origin: Origin | None = None,
) -> Forward:
    """The forward pass for where these weights are.

    Args:
        run: how its programs are called (`infer.engine.programs`).
        hidden: whether it returns the input of the head at every token too.
        replace, origin: as in `ByLayer`.
        whole: whether it is one program wherever they are.
    """
    if viewable(weights) and not whole:
        return ByLayer(model, adapters, run=run, hidden=hidden, replace=replace, origin=origin)
    return Whole(model, adapters, run=run, hidden=hidden)


class Whole:
    """The forward pass as one program."""

    def __init__(self, model: Any, adapters: "Adapters | None" = None, *, run: Run = plainly, hidden: bool = False):
        self.adapters, self.run = adapters, run
        model = model if adapters is None else adapters.on(model)
        self.specs: Specs = model.layers.holds()
        graph = split(model)[0]
        self._program, self._several = _whole(graph, model.dtype, hidden), _several(graph, model.dtype)

    def prepared(self, weights: Leaves) -> Leaves:
        return weights if self.adapters is None else {own: weights[base] for own, base in self.adapters.base.items()}

    def forget(self) -> None:
        pass

    def __call__(self, weights: Leaves, caches: Caches, last: Any, words: Any, picks: Any, sizes: Sizes) -> Passed:
        weights = self._with_adapters(weights, words, picks, sizes)
        return self.run(self._program, (sizes, len(picks)), weights, caches, last, words, picks, sizes)

    def several(
        self, weights: Leaves, caches: Caches, slots: Slots, words: Any, picks: Any, owners: Any, sizes: Sizes
    ) -> tuple[Slots, Caches, Sampled]:
        """Several steps of decoding rows, each with its sampler: the state of the sampler, the caches, and arrays [steps B ...].

        Args:
            picks, owners: as a step's, for the sampler.
        """
        weights = self._with_adapters(weights, words, picks, sizes)
        return self.run(self._several, (sizes, len(picks)), weights, caches, slots, words, picks, owners, sizes)

    def _with_adapters(self, weights: Leaves, words: Any, picks: Any, sizes: Sizes) -> Leaves:
        if (adapters := self.adapters) is None:
            return weights
        return weights | adapters.arrays | adapters.leaves(adapters.tokens(words, sizes), picks)


class ByLayer:
    """The forward pass as programs of its parts: before the layers, each kind of run of layers, after the layers.

    Args:
        run: how programs are called (`infer.engine.programs`).
        replace: what to do with each weight that is packed, by the model's address; None: packed weights are copies.
        origin: as in `Packs`.
    """

    def __init__(
        self,
        model: Any,
        adapters: "Adapters | None" = None,
        *,
        run: Run = plainly,
        hidden: bool = False,
        replace: Replace | None = None,
        origin: Origin | None = None,
    ):
        self.views, self.adapters, self.run = Views(model) if model.layers.run.stacked else None, adapters, run
        if self.views is None:
            self.packs = packs_of(model, replace, origin)
        else:
            self.packs = packs_of(self.views.model)
        model = model if self.views is None else self.views.model
        model = model if adapters is None else adapters.on(model)
        self.specs: Specs = model.layers.holds()
        self.layers = Layers(model, TOGETHER)
        self._before, self._after = _before(*self.layers.outside), _after(*self.layers.outside, hidden)

    def prepared(self, weights: Leaves) -> tuple[Leaves, list[Leaves]]:
        weights = weights if self.views is None else self.views.of(weights)
        if self.packs is not None:
            weights = self.packs.of(weights)
        if self.adapters is not None:
            weights = {own: weights[base] for own, base in self.adapters.base.items()}
        return self.layers.prepared(weights)

    def forget(self) -> None:
        if self.packs is not None:
            self.packs.forget()

    def __call__(
        self, weights: tuple[Leaves, Sequence[Leaves]], caches: Caches, last: Any, words: Any, picks: Any, sizes: Sizes
    ) -> Passed:
        outside, layers = weights
        if (adapters := self.adapters) is not None:
            more = self.layers.prepared(adapters.arrays | adapters.leaves(adapters.tokens(words, sizes), picks))
            outside, layers = outside | more[0], [own | added for own, added in zip(layers, more[1])]
        x, attend = self.run(self._before, sizes, outside, last, words, sizes)
        x, kept = self.layers(layers, x, caches, attend, self.run, sizes)
        logits, normed = self.run(self._after, (sizes.tokens, len(picks)), outside, x, picks)
        return Passed(logits, kept, normed)


# ---------------------------------------------------------------- programs


def read_step(last: Array, words: Array, sizes: Sizes, step: Array | int = 0) -> tuple[Int[Array, "B T"], Ragged]:
    """The tokens of a step [1 tokens], and its strategy.

    Args:
        step: the number of this step, of several.
    """
    d, *wider = cut(words, sizes)
    groups, flat = [], []
    if "steps" in d:
        d |= {"slot": jnp.where(step < d["steps"], d["slot"], -1), "length": d["length"] + step}

    def group(rows: dict[str, Array], new: Array, width: int) -> None:
        windows = {w: (rows[f"first{i}"], rows[f"window{i}"]) for i, w in enumerate(sizes.tables.windows)}
        t = _counting(len(new), width)
        groups.append(Paged(rows["table"], rows["slot"], rows["length"], new, t, windows=windows))

    if sizes.decodes:
        group(d, (d["slot"] >= 0).astype(jnp.int32), 1)
        flat.append(jnp.take(last, d["slot"], mode="clip"))
    for rows in wider:
        if rows["tokens"].size:
            group(rows, rows["new"], rows["tokens"].shape[1])
            flat.append(rows["tokens"].reshape(-1))
    return jnp.concatenate(flat)[None], Ragged(tuple(groups))


def _counting(rows: int, width: int) -> Int[Array, "B T"]:
    return jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))


@lru_cache(maxsize=16)
def _whole(graph: Any, dtype: Any, hidden: bool) -> Any:
    """(weights, caches, last, words, picks, Sizes) -> Passed."""

    def whole(weights: Leaves, caches: Caches, last: Array, words: Array, picks: Array, sizes: Sizes) -> Passed:
        model = model_of(graph, weights, dtype)
        specs = model.layers.holds()
        x, caches, _ = model.hidden(*read_step(last, words, sizes), caches)
        logits = model.unembed(x[:, picks])[0]
        if on_several_devices():
            # In each step as before it, or XLA might choose others and the next step would compile again.
            caches = laid_out(specs, caches)
            logits, x = (jax.lax.with_sharding_constraint(a, PartitionSpec()) for a in (logits, x))
        return Passed(logits, caches, x if hidden else None)

    return Program(whole, donate=1, static=5)


@lru_cache(maxsize=16)
def _several(graph: Any, dtype: Any) -> Any:
    """(weights, caches, state of the sampler, words, picks, owners, Sizes) -> (state of the sampler, caches, Sampled)."""

    def several(
        weights: Leaves, caches: Caches, slots: Slots, words: Array, picks: Array, owners: Array, sizes: Sizes
    ) -> tuple[Slots, Caches, Sampled]:
        model = model_of(graph, weights, dtype)
        specs, steps = model.layers.holds(), cut(words, sizes)[0]["steps"]

        def one(state: tuple[Slots, Caches], step: Array) -> Any:
            slots, caches = state
            x, caches, _ = model.hidden(*read_step(slots.last, words, sizes, step), caches)
            logits = model.unembed(x[:, picks])[0]
            if on_several_devices():
                caches = laid_out(specs, caches)
                logits = jax.lax.with_sharding_constraint(logits, PartitionSpec())
            slots, found = sampled(slots, logits, jnp.where(step < steps[picks], owners, -1))
            return (slots, caches), found

        (slots, caches), found = jax.lax.scan(one, (slots, caches), jnp.arange(sizes.steps, dtype=jnp.int32))
        return slots, caches, found

    return Program(several, donate=(1, 2), static=6)


@lru_cache(maxsize=16)
def _before(graph: Any, dtype: Any, absent: Any) -> Any:
    """(weights outside the layers, last, words, Sizes) -> (input of the layers, strategy)."""

    def before(outside: Leaves, last: Array, words: Array, sizes: Sizes) -> tuple[Array, Attend]:
        model = model_of(graph, outside, dtype, absent)
        tokens, attend = read_step(last, words, sizes)
        return model.embedded(tokens, attend), model.layers.with_angles(attend)

    return Program(before, static=3)


@lru_cache(maxsize=16)
def _after(graph: Any, dtype: Any, absent: Any, hidden: bool) -> Any:
    """(weights outside the layers, output of the layers, picks) -> (logits, input of the head at every token if `hidden`)."""

    def after(outside: Leaves, x: Array, picks: Array) -> tuple[Array, Array | None]:
        model = model_of(graph, outside, dtype, absent)
        if not hidden:
            return model.unembed(model.norm(x[:, picks]))[0], None
        normed = model.norm(x)
        return model.unembed(normed[:, picks])[0], normed

    return Program(after)
