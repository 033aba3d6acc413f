"""The low-rank adapters of an engine: loaded and unloaded while it runs, and another one for each sequence (multi-LoRA).

The bank (`adapt.bank`) keeps all adapters in one pair of arrays A, B for each contraction. It has a fixed number of places, each for
one adapter of at most a fixed rank. The place that a token uses is an input of the compiled program, so loading and choosing adapters
compiles nothing after warm-up. An adapter that is unloaded or replaced keeps its place until the sequences that use it have ended; its
successor takes a free place.

Forward passes over whole sequences (`infer.forward.sequences`) use the same arrays, with one adapter for the whole pass.

Over several devices, the sharding rules of the weights apply to the factors too. If a weight is split along one of its axes, the factor
that has this axis is split along it, and the other factor is replicated. As in S-LoRA (arXiv:2311.03285), tensor parallelism over heads
splits B of a query projection and A of the output projection. The latter costs an all-reduce of `adapters * rank` numbers a token.
"""

import copy
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from argosy.adapt.bank import AdapterIds, Bank, bank_refusal
from argosy.adapt.surgery import find, put_at
from argosy.core.errors import BadInput, Unsupported, nearest, some
from argosy.infer.forward.step import StepSizes, split_words
from argosy.infer.placement import Home, weights_home, weights_mesh
from argosy.infer.settings import LoraSettings
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack.addresses import layer_addresses
from argosy.models.parts.weight import Leaves, Meaning, logical, merge, split, variables
from argosy.parallel.rules import DEFAULT, shardings
from argosy.parallel.scope import scope
from argosy.weights.peft.reader import read_adapter
from argosy.weights.peft.sites import Adapter

# One adapter as it is written into its place of the bank: a host array for each factor, by the factor's parameter name.
Factors = dict[str, np.ndarray]


class UnknownAdapter(BadInput):
    """No adapter of this name is loaded."""


class LoadedAdapter(NamedTuple):
    """A loaded adapter.

    place: its index in the bank.
    number: a serial number, counted from 1; never used twice in one engine.
    """

    name: str
    place: int
    number: int


class AdapterFactor(NamedTuple):
    """One array of the bank.

    side: which factor it is, `a` or `b`.
    layers: per-layer names of the contractions whose factors it holds.
    stacked: 1 if its leading axis is the layer axis, else 0.
    place: index of the axis of the bank's places, not counting the layer axis. The rank axis follows it.
    """

    side: str
    layers: list[str]
    stacked: int
    place: int

    def write(self, into: np.ndarray, name: str, adapter: Adapter) -> None:
        """Writes one contraction's factor of an adapter into `into`, an array of this shape with one place and no layer axis.

        Raises:
            BadInput: the factor has another shape, or values that are not finite, which would corrupt other requests.
        """
        values = np.asarray(adapter.a if self.side == "a" else np.float32(adapter.gain) * adapter.b, np.float32)
        view = into[(*[slice(None)] * self.place, 0, slice(adapter.a.shape[-1]))]
        if view.shape != values.shape:
            raise BadInput(f"{name}: factors of {values.shape} for a weight that takes {view.shape}")
        if not np.isfinite(values).all():
            raise BadInput(f"{name}: the adapter has numbers that are not finite")
        view[...] = values


@dataclass
class _Bank:
    """The factors and the model with banks, shared by all engines over one model.

    home: the device or sharding of arrays that are not split.
    loaded: the loaded adapters, by name. The mapping is replaced as a whole and never changed in place, so any thread may read it.
    arrays: the factors of all places, by parameter name.
    users: number of sequences that use each place.
    count: number of adapters loaded so far.
    model: the model with banks; None before the first call of `Adapters.on`.
    factors: a description of each array in `arrays`.
    chosen: the leading axes of each variable that holds the tokens' places, by parameter name.
    base: for each weight of the model with banks, its parameter name in the model without banks.
    carrying: the per-layer names of the contractions with a bank.
    """

    home: Home = None
    loaded: Mapping[str, LoadedAdapter] = field(default_factory=dict)
    arrays: Leaves = field(default_factory=dict)
    users: Counter[int] = field(default_factory=Counter)
    count: int = 0
    model: Any = None
    factors: dict[str, AdapterFactor] = field(default_factory=dict)
    chosen: dict[str, tuple[int, ...]] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)
    carrying: set[str] = field(default_factory=set)


def put_banks(model: Any, settings: LoraSettings) -> dict[str, Contraction]:
    """Puts banks on the contractions that match `settings.where`; changes the model in place. Returns the original contractions, by
    name.

    Raises:
        BadInput: no contraction that matches can carry adapters.
    """
    kinds: dict[str, AdapterIds] = {}
    banks: dict[str, Contraction] = {}
    for name, of in find(model, settings.where).items():
        if bank_refusal(name, of, model.config.tied) is None:
            # All contractions of a layer share one variable with the tokens' places, so each layer's program has one such array.
            owner = ".".join(name.split(".")[:2])
            stacked = of.shape[: of.stacked]
            ids = kinds.setdefault(owner, AdapterIds(jax.ShapeDtypeStruct((*stacked, 1, 1), jnp.int32), meaning=Meaning("BT")))
            put_at(model, name, Bank(of, settings.adapters, settings.rank, ids))
            banks[name] = of
    if not banks:
        raise BadInput(f"engine.lora.where: nothing that matches `{settings.where}` can carry adapters")
    return banks


class Adapters:
    """The adapters of one engine.

    Args:
        model: a module whose config, dtype and placement are read. The module that the engine runs is passed to `on` later.
        slots: number of slots of the engine.
    """

    def __init__(self, settings: LoraSettings, model: Any, slots: int):
        self.settings, self.config, self.dtype = settings, model.config, model.dtype
        self._bank = _Bank(home=weights_home(split(model)[1]))
        self._places = np.full(slots, -1, np.int32)

    def for_engine(self, slots: int) -> "Adapters":
        """The same adapters for another engine over the same model."""
        other = copy.copy(self)
        other._places = np.full(slots, -1, np.int32)
        return other

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        """The adapters that requests may name, by name. Any thread may read this mapping."""
        return self._bank.loaded

    @property
    def arrays(self) -> Leaves:
        """The factors of all places, by parameter name."""
        return self._bank.arrays

    @property
    def base(self) -> Mapping[str, str]:
        """For each weight of the model with banks, its parameter name in the model without banks."""
        return self._bank.base

    # ---------------------------------------------------------------- the model

    def on(self, model: Any) -> Any:
        """Returns a copy of the model with banks on the contractions that match. Its weights are `ShapeDtypeStruct`s; `model` is not
        changed. Further calls return the first call's result.

        Raises:
            BadInput: no contraction that matches can carry adapters.
            ValueError: the first call's model had other parameter names, such as those of another layout of the layers.
        """
        graph, leaves = split(model)
        if self._bank.model is not None:
            if set(self.base.values()) != set(leaves):
                raise ValueError("these adapters are on a model in another layout")
            return self._bank.model
        out = merge(graph, {address: jax.ShapeDtypeStruct(a.shape, a.dtype) for address, a in leaves.items()})
        out.dtype = model.dtype
        banks = put_banks(out, self.settings)
        self._describe(out, banks, weights_mesh(leaves))
        self._bank.model = out
        return out

    def _describe(self, out: Any, banks: Mapping[str, Contraction], mesh: Mesh | None) -> None:
        """Records the parameter names of the model with banks, and allocates the factors."""
        names, model_variables, bank = layer_addresses(out), variables(out), self._bank
        for name, of in banks.items():
            layers = [address.removesuffix(".a") for address in names(f"{name}.a")]
            for side, letters in (("a", of.group + of.inner), ("b", of.group)):
                bank.factors[f"{name}.{side}"] = AdapterFactor(side, layers, of.stacked, len(letters))
        bank.chosen = {address: v.shape[:-2] for address, v in model_variables.items() if isinstance(v, AdapterIds)}
        bank.base = {a: a for a in model_variables.keys() - bank.factors.keys() - bank.chosen.keys()}
        for address in bank.base:
            # In a model that has adapters already, the name contains `.of.` twice.
            name, inside, rest = address.partition(".of.")
            if inside and name in banks:
                bank.base[address] = f"{name}.{rest}"
        shapes, axes = {address: model_variables[address].shape for address in bank.factors}, logical(out)
        places = {} if mesh is None else shardings({address: axes[address] for address in shapes}, shapes, DEFAULT, mesh)
        for address, shape in shapes.items():
            bank.arrays[address] = jnp.zeros(shape, self.dtype, device=places.get(address, bank.home))
        bank.carrying = {name for factor in bank.factors.values() for name in factor.layers}

    def step_leaves(self, words: np.ndarray, picks: Any, sizes: StepSizes) -> Leaves:
        """The inputs of a step besides the model's weights, by parameter name: the factors of all places, and for each bank the place
        of each token. The head gets the places of the picked tokens only.

        Args:
            words: the rows of the step, as in `StepBatch`.
            picks: indices of the tokens whose logits are computed.
        """
        places = self.token_places(words, sizes)
        return self.arrays | self._spread(places, places[:, np.asarray(picks)])

    def sequence_leaves(self, adapter: LoadedAdapter | None, rows: int, length: int) -> Leaves:
        """As `step_leaves`, for a forward pass over whole sequences [rows length].

        Args:
            adapter: the adapter of every token; None: the model alone.
        """
        places = np.full((rows, length), -1 if adapter is None else adapter.place, np.int32)
        return self.arrays | self._spread(places, places[:1, :1])

    def token_places(self, words: np.ndarray, sizes: StepSizes) -> Int[np.ndarray, "1 tokens"]:
        """The place in the bank of each token's adapter, in the order of the step's tokens; -1 for tokens without one."""
        decodes, drafted, rows = (part["slot"] for part in split_words(words, sizes))
        slots = np.concatenate([decodes, np.repeat(drafted, sizes.draft_width), np.repeat(rows, sizes.width)])
        return np.where(slots < 0, -1, self._places[np.maximum(slots, 0)])[None].astype(np.int32)

    def _spread(self, places: np.ndarray, head_places: np.ndarray) -> Leaves:
        placed: dict[Any, Array] = {}
        out: Leaves = {}
        for address, lead in self._bank.chosen.items():
            picked = address.startswith("head.")
            if (lead, picked) not in placed:
                ids = head_places if picked else places
                placed[lead, picked] = jax.device_put(np.broadcast_to(ids, (*lead, *ids.shape)), self._bank.home)
            out[address] = placed[lead, picked]
        return out

    # ---------------------------------------------------------------- loading

    def read(self, folder: str | Path) -> Factors:
        """Reads a PEFT folder into host arrays for `put`. It loads nothing, and any thread may call it.

        Raises:
            BadInput: it is no adapter of this model, its rank is above the maximum, or it adapts contractions without a bank.
            Unsupported: it has more than low-rank factors (DoRA, biases).
        """
        return self.packed(read_adapter(folder, self.config))

    def packed(self, adapters: Mapping[str, Adapter]) -> Factors:
        """Packs the factors of one adapter into host arrays for one place: padded to the maximal rank, with the gain multiplied into B.

        Args:
            adapters: the factors of each adapted contraction, by per-layer name.

        Raises:
            BadInput, Unsupported: as `read`.
        """
        if dora := sorted(name for name, adapter in adapters.items() if adapter.m is not None):
            problem = f"DoRA beside other adapters is not built: {some(dora)}"
            raise Unsupported(problem, hint="argosy.load(MODEL, adapter=FOLDER) takes one alone; argosy convert merges it")
        most = self.settings.rank
        if strange := sorted(set(adapters) - self._bank.carrying):
            problem = f"{len(strange)} of the adapter's contractions carry none here: {', '.join(strange[:4])}"
            raise BadInput(problem, hint=f"those that do match `{self.settings.where}`: engine.lora.where")
        if large := sorted(name for name, adapter in adapters.items() if adapter.a.shape[-1] > most):
            rank = max(adapters[name].a.shape[-1] for name in large)
            raise BadInput(f"rank {rank} is above the maximum of {most}: {some(large)}", hint=f"engine.lora.rank={rank}")
        out: Factors = {}
        for address, factor in self._bank.factors.items():
            shape, at = list(self.arrays[address].shape), factor.stacked + factor.place
            shape[at] = 1
            out[address] = np.zeros(shape, np.dtype(self.dtype))
            for i, name in enumerate(factor.layers):
                if name in adapters:
                    whole = out[address][i] if factor.stacked else out[address]
                    factor.write(whole, name, adapters[name])
        return out

    def place_for(self, name: str, *, replace: bool = False) -> int:
        """The place that `put` would give an adapter of this name.

        Args:
            replace: whether a loaded adapter of this name may be replaced.

        Raises:
            BadInput: the name is taken and `replace` is false, or no place is free.
        """
        if name in self.loaded and not replace:
            raise BadInput(f"an adapter `{name}` is loaded already", hint="unload it first, or replace it")
        old = self.loaded.get(name)
        free = self._free(old)
        if not free:
            loaded = {adapter.place for adapter in self.loaded.values()}
            still = sum(place not in loaded for place, users in self._bank.users.items() if users)
            why = f", {still} of them by adapters that are unloaded and still answer" if still else ""
            hint = "unload one, or have more: engine.lora.adapters=N"
            raise BadInput(f"all {self.settings.adapters} places for adapters are taken{why}", hint=hint)
        return old.place if old is not None and old.place in free else free[0]

    def put(self, name: str, factors: Factors, *, replace: bool = False) -> LoadedAdapter:
        """Loads an adapter under a name. Sequences that use a replaced adapter finish with the old one.

        Raises:
            BadInput: as `place_for`.
        """
        place = self.place_for(name, replace=replace)
        self._write(factors, place)
        bank = self._bank
        bank.count += 1
        bank.loaded = {**bank.loaded, name: LoadedAdapter(name, place, bank.count)}
        return bank.loaded[name]

    def unload(self, name: str) -> None:
        """Unloads an adapter. Requests that use it finish with it; new ones are refused.

        Raises:
            UnknownAdapter: no adapter of this name is loaded.
        """
        self.get(name)
        self._bank.loaded = {other: adapter for other, adapter in self.loaded.items() if other != name}

    def compile(self) -> None:
        """Compiles the programs that load an adapter, by loading zeros into the first free place."""
        if free := self._free():
            self._write(self.packed({}), free[0])

    def _write(self, factors: Factors, place: int) -> None:
        # The old arrays are not donated, because another thread may be compiling a pass that reads them (`infer.prompt_logprobs`).
        # They are replaced one after the other, because two copies of one array need less memory than two copies of all.
        arrays, mesh = self._bank.arrays, weights_mesh(self._bank.arrays)
        with nullcontext() if mesh is None else scope(mesh):
            for address, factor in self._bank.factors.items():
                whole, axis = arrays[address], factor.stacked + factor.place
                on = None if mesh is None else whole.sharding
                arrays[address] = _placed(whole, factors[address], np.int32(place), axis, on)

    def _free(self, besides: LoadedAdapter | None = None) -> list[int]:
        """The places that no loaded adapter has and no sequence uses. The place of `besides` counts as given up by that adapter."""
        taken = {adapter.place for adapter in self.loaded.values() if adapter is not besides}
        taken |= {place for place, users in self._bank.users.items() if users}
        return [place for place in range(self.settings.adapters) if place not in taken]

    # ---------------------------------------------------------------- sequences

    def get(self, name: str) -> LoadedAdapter:
        """The adapter of this name.

        Raises:
            UnknownAdapter: there is no such adapter.
        """
        if (adapter := self.loaded.get(name)) is None:
            raise UnknownAdapter(f"no adapter `{name}` is loaded", hint=nearest(name, self.loaded))
        return adapter

    def use(self, adapter: LoadedAdapter | None) -> None:
        """Counts a new sequence as a user of this adapter, from the moment that it is queued."""
        if adapter is not None:
            self._bank.users[adapter.place] += 1

    def leave(self, adapter: LoadedAdapter | None) -> None:
        """Removes a sequence that has ended from the users of this adapter."""
        if adapter is not None:
            self._bank.users[adapter.place] -= 1

    def assign(self, slot: int, adapter: LoadedAdapter | None) -> None:
        """Sets the adapter of a slot to that of its new owner."""
        self._places[slot] = -1 if adapter is None else adapter.place

    @staticmethod
    def salt(adapter: LoadedAdapter | None, salt: str) -> str:
        """The salt of a sequence's KV-cache pages. Sequences under different adapters, or under one and none, never share pages,
        whatever salts users give."""
        return f"{'' if adapter is None else adapter.number}:{salt}"


@partial(jax.jit, static_argnums=(3, 4))
def _placed(whole: Array, part: Array, place: Array, axis: int, on: Any) -> Array:
    """Replaces the entry `place` of an array of the bank along `axis`. The result has the sharding `on`; None: one device."""
    out = jax.lax.dynamic_update_slice_in_dim(whole, part, place, axis)
    return out if on is None else jax.lax.with_sharding_constraint(out, on)
