"""The low-rank adapters of an engine: loaded and unloaded while it runs, and another one for each sequence (multi-LoRA).

All of them together are one pair of arrays for each contraction (`adapt.bank`), with places for a fixed number of adapters of a fixed
rank. Which place a token uses is data, so loading and naming adapters compiles nothing after warm-up. An adapter that is unloaded or
replaced keeps its place until the sequences that use it have ended; a new one takes a free place.

Whole sequences (`infer.forward.sequences`) are computed under an adapter with the same arrays, one adapter a pass.

Over several devices, the rules for weights split the factors too: the one that has the letter along which the weight is split is
split likewise, the other is whole on every device. Heads split B of a query projection and A of the output projection, as in S-LoRA
(arXiv:2311.03285): the second costs a sum over the devices of `adapters * rank` numbers a token.
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

# A place of the bank: host arrays by the address of the factor, with one adapter each.
Factors = dict[str, np.ndarray]


class UnknownAdapter(BadInput):
    """No adapter of this name is loaded."""


class LoadedAdapter(NamedTuple):
    """An adapter.

    place: in the bank.
    number: how many were loaded before it; no two of one engine have the same.
    """

    name: str
    place: int
    number: int


class AdapterFactor(NamedTuple):
    """One array of the bank.

    side: a or b.
    layers: the contractions it is of.
    stacked: whether they are its leading axis.
    place: the axis of the places, after that one; the rank is the next.
    """

    side: str
    layers: list[str]
    stacked: int
    place: int

    def write(self, into: np.ndarray, name: str, adapter: Adapter) -> None:
        """Writes the factor of one contraction into the only place of an array.

        Raises:
            BadInput: it is of another shape, or has numbers that are not finite, which would spoil other requests.
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
    """The factors and the model that the engines over one model share.

    home: where arrays lie on one device.
    loaded: replaced as a whole, never changed, so other threads may read it at any time.
    users: sequences by place.
    model: with banks.
    base: the model's own address of each weight.
    chosen: the leading axes of each variable that takes the places of tokens.
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
    """Puts banks on the contractions of a model that match. Returns these, without banks, by name.

    Raises:
        BadInput: nothing that matches can carry adapters.
    """
    kinds: dict[str, AdapterIds] = {}
    banks: dict[str, Contraction] = {}
    for name, of in find(model, settings.where).items():
        if bank_refusal(name, of, model.config.tied) is None:
            # The layers of a block see the same tokens, and share the variable: it is one array of each layer's program.
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
        model: a module, for its settings and type; `on` is called with the module that the engine runs.
        slots: number of the engine's slots.
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
        """The adapters that requests may name. Any thread may read it."""
        return self._bank.loaded

    @property
    def arrays(self) -> Leaves:
        """The factors of all places."""
        return self._bank.arrays

    @property
    def base(self) -> Mapping[str, str]:
        """The model's own address of each weight of the model with banks."""
        return self._bank.base

    # ---------------------------------------------------------------- the model

    def on(self, model: Any) -> Any:
        """The model with banks on the contractions that match, its weights as descriptions. The model itself stays as it is. Further
        calls return what the first one made.

        Raises:
            BadInput: nothing that matches can carry adapters.
            ValueError: the first call was for another layout of the layers.
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
        """Records the addresses of the model with banks, and allocates the factors."""
        names, model_variables, bank = layer_addresses(out), variables(out), self._bank
        for name, of in banks.items():
            layers = [address.removesuffix(".a") for address in names(f"{name}.a")]
            for side, letters in (("a", of.group + of.inner), ("b", of.group)):
                bank.factors[f"{name}.{side}"] = AdapterFactor(side, layers, of.stacked, len(letters))
        bank.chosen = {address: v.shape[:-2] for address, v in model_variables.items() if isinstance(v, AdapterIds)}
        bank.base = {a: a for a in model_variables.keys() - bank.factors.keys() - bank.chosen.keys()}
        for address in bank.base:
            # A model with adapters of its own has `of` below `of`.
            name, inside, rest = address.partition(".of.")
            if inside and name in banks:
                bank.base[address] = f"{name}.{rest}"
        shapes, axes = {address: model_variables[address].shape for address in bank.factors}, logical(out)
        places = {} if mesh is None else shardings({address: axes[address] for address in shapes}, shapes, DEFAULT, mesh)
        for address, shape in shapes.items():
            bank.arrays[address] = jnp.zeros(shape, self.dtype, device=places.get(address, bank.home))
        bank.carrying = {name for factor in bank.factors.values() for name in factor.layers}

    def step_leaves(self, words: np.ndarray, picks: Any, sizes: StepSizes) -> Leaves:
        """The weights that a step has besides those of the model: the factors, and the place of each token for each variable that takes
        places. The head takes those of the picked tokens."""
        places = self.token_places(words, sizes)
        return self.arrays | self._spread(places, places[:, np.asarray(picks)])

    def sequence_leaves(self, adapter: LoadedAdapter | None, rows: int, length: int) -> Leaves:
        """The weights of a program over whole sequences [rows length] under one adapter, or under none; otherwise like `step_leaves`.
        The head may process any number of tokens.
        """
        places = np.full((rows, length), -1 if adapter is None else adapter.place, np.int32)
        return self.arrays | self._spread(places, places[:1, :1])

    def token_places(self, words: np.ndarray, sizes: StepSizes) -> Int[np.ndarray, "1 tokens"]:
        """The place of each token of a step, -1 for none."""
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
        """Reads a PEFT folder. It changes nothing, and any thread may call it.

        Raises:
            BadInput: it is no adapter of this model, its rank is above the maximum, or it adapts what cannot carry adapters here.
            Unsupported: it changes the model in another way too (DoRA, biases).
        """
        return self.packed(read_adapter(folder, self.config))

    def packed(self, adapters: Mapping[str, Adapter]) -> Factors:
        """Adapters by per-layer name as the arrays of one place: padded to the rank, with the gain in B.

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

        Raises:
            BadInput: the name is taken, or every place is.
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
        """Loads an adapter under a name. Sequences that use an earlier one of this name finish with that.

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
            NoAdapter: there is none of this name.
        """
        self.get(name)
        self._bank.loaded = {other: adapter for other, adapter in self.loaded.items() if other != name}

    def compile(self) -> None:
        """Compiles the programs that load an adapter, by loading zeros into the first free place."""
        if free := self._free():
            self._write(self.packed({}), free[0])

    def _write(self, factors: Factors, place: int) -> None:
        # An array at a time: the old ones are not donated, because another thread may be compiling a pass that reads them
        # (`infer.prompt_logprobs`), and two copies of one array need less memory than two of all.
        arrays, mesh = self._bank.arrays, weights_mesh(self._bank.arrays)
        with nullcontext() if mesh is None else scope(mesh):
            for address, factor in self._bank.factors.items():
                whole, axis = arrays[address], factor.stacked + factor.place
                on = None if mesh is None else whole.sharding
                arrays[address] = _placed(whole, factors[address], np.int32(place), axis, on)

    def _free(self, besides: LoadedAdapter | None = None) -> list[int]:
        """The places that no adapter and no sequence has. besides: an adapter that gives up its own."""
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
        """A sequence with this adapter begins to wait."""
        if adapter is not None:
            self._bank.users[adapter.place] += 1

    def leave(self, adapter: LoadedAdapter | None) -> None:
        """It has ended."""
        if adapter is not None:
            self._bank.users[adapter.place] -= 1

    def assign(self, slot: int, adapter: LoadedAdapter | None) -> None:
        """A slot has a new owner, with this adapter."""
        self._places[slot] = -1 if adapter is None else adapter.place

    @staticmethod
    def salt(adapter: LoadedAdapter | None, salt: str) -> str:
        """The salt of a sequence's pages: no two adapters share pages, nor does one with the model alone, whatever salts users give."""
        return f"{'' if adapter is None else adapter.number}:{salt}"


@partial(jax.jit, static_argnums=(3, 4))
def _placed(whole: Array, part: Array, place: Array, axis: int, on: Any) -> Array:
    """An array of the bank with one place along an axis replaced, split over devices as before (on; None: one device)."""
    out = jax.lax.dynamic_update_slice_in_dim(whole, part, place, axis)
    return out if on is None else jax.lax.with_sharding_constraint(out, on)
