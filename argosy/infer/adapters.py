"""The low-rank adapters of an engine: loaded and unloaded while it runs, and another one for each sequence (multi-LoRA).

All of them together are one pair of arrays for each contraction (`adapt.bank`), with places for a fixed number of adapters of a fixed
rank. One program writes an adapter into a place, so nothing is compiled after warm-up. An adapter that is unloaded or replaced keeps
its place until the sequences that use it have ended; a new one takes a free place.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from argosy.adapt.bank import Bank, Chosen, refused
from argosy.adapt.surgery import find, put_at
from argosy.checkpoint.peft import Adapter, read_adapter
from argosy.core.errors import BadInput, nearest
from argosy.infer.forward import Sizes, cut
from argosy.infer.settings import LoraSettings
from argosy.models.parts.einsum import Contraction
from argosy.models.parts.stack import layer_addresses
from argosy.models.parts.weight import Leaves, Meaning, merge, split, variables

# A place of the bank: host arrays by the address of the factor, with one adapter each.
Factors = dict[str, np.ndarray]


class NoAdapter(BadInput):
    """A name under which no adapter is loaded."""


class Loaded(NamedTuple):
    """An adapter. place: in the bank. number: how many were loaded before it; no two of one engine have the same."""

    name: str
    place: int
    number: int


class Factor(NamedTuple):
    """One array of the bank. side: a or b. layers: the contractions it is of. stacked: whether they are its leading axis. place: the
    axis of the places, after that one; the rank is the next."""

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
        own = into[(*[slice(None)] * self.place, 0, slice(adapter.a.shape[-1]))]
        if own.shape != values.shape:
            raise BadInput(f"{name}: factors of {values.shape} for a weight that takes {own.shape}")
        if not np.isfinite(values).all():
            raise BadInput(f"{name}: the adapter has numbers that are not finite")
        own[...] = values


class Adapters:
    """The adapters of one engine.

    Args:
        model: for its settings and type; `on` is called with what the engine runs.
        slots: of the engine.
    """

    def __init__(self, settings: LoraSettings, model: Any, slots: int):
        self.settings, self.config, self.dtype = settings, model.config, model.dtype
        # Replaced as a whole, never changed, so other threads may read it at any time.
        self.loaded: Mapping[str, Loaded] = {}
        self.arrays: Leaves = {}
        self._users: Counter[int] = Counter()
        self._count = 0
        self._places = np.full(slots, -1, np.int32)

    # ---------------------------------------------------------------- the model

    def on(self, model: Any) -> Any:
        """The model with banks on the contractions that match, its weights as descriptions. The model itself stays as it is.

        Raises:
            BadInput: nothing that matches can carry adapters, or the weights are on several devices.
        """
        graph, leaves = split(model)
        if any(isinstance(a, jax.Array) and len(a.devices()) > 1 for a in leaves.values()):
            raise BadInput("adapters in a model on several devices are not built", hint="leave out engine.lora")
        out = merge(graph, {address: jax.ShapeDtypeStruct(a.shape, a.dtype) for address, a in leaves.items()})
        out.dtype = model.dtype
        kinds: dict[str, Chosen] = {}
        banks: dict[str, Contraction] = {}
        for name, of in find(out, self.settings.where).items():
            if refused(name, of, self.config.tied) is None:
                # The layers of a block see the same tokens, and share the variable: it is one array of each layer's program.
                owner = ".".join(name.split(".")[:2])
                stacked = of.shape[: of.stacked]
                one = kinds.setdefault(owner, Chosen(jax.ShapeDtypeStruct((*stacked, 1, 1), jnp.int32), meaning=Meaning("BT")))
                put_at(out, name, Bank(of, self.settings.adapters, self.settings.rank, one))
                banks[name] = of
        if not banks:
            raise BadInput(f"engine.lora.where: nothing that matches `{self.settings.where}` can carry adapters")
        self._describe(out, banks)
        return out

    def _describe(self, out: Any, banks: Mapping[str, Contraction]) -> None:
        """Records the addresses of the model with banks, and allocates the factors."""
        names, own = layer_addresses(out), variables(out)
        self.factors: dict[str, Factor] = {}
        for name, of in banks.items():
            layers = [address.removesuffix(".a") for address in names(f"{name}.a")]
            for side, letters in (("a", of.group + of.inner), ("b", of.group)):
                self.factors[f"{name}.{side}"] = Factor(side, layers, of.stacked, len(letters))
        self.chosen = {address: v.shape[:-2] for address, v in own.items() if isinstance(v, Chosen)}
        self.base = {a: a for a in own.keys() - self.factors.keys() - self.chosen.keys()}
        for address in self.base:
            # A model with adapters of its own has `of` below `of`.
            name, inside, rest = address.partition(".of.")
            if inside and name in banks:
                self.base[address] = f"{name}.{rest}"
        self.arrays = {address: jnp.zeros(own[address].shape, self.dtype) for address in self.factors}
        self._carrying = {name for factor in self.factors.values() for name in factor.layers}

    def tokens(self, words: np.ndarray, sizes: Sizes) -> Int[np.ndarray, "1 tokens"]:
        """The place of each token of a step, -1 for none."""
        decodes, drafted, rows = (part["slot"] for part in cut(words, sizes))
        slots = np.concatenate([decodes, np.repeat(drafted, sizes.ahead), np.repeat(rows, sizes.width)])
        return np.where(slots < 0, -1, self._places[np.maximum(slots, 0)])[None].astype(np.int32)

    def leaves(self, tokens: Int[np.ndarray, "1 tokens"], picks: Any) -> dict[str, Array]:
        """The places of the tokens, for each variable that takes them: for the head those of the picked tokens."""
        placed: dict[Any, Array] = {}
        out = {}
        for address, lead in self.chosen.items():
            picked = address.startswith("head.")
            if (lead, picked) not in placed:
                own = tokens[:, np.asarray(picks)] if picked else tokens
                placed[lead, picked] = jax.device_put(np.broadcast_to(own, (*lead, *own.shape)))
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
            BadInput: as `read`.
        """
        most = self.settings.rank
        if strange := sorted(set(adapters) - self._carrying):
            what = f"{len(strange)} contractions of the adapter carry none here: {', '.join(strange[:4])}"
            raise BadInput(what, hint=f"those that do match `{self.settings.where}`: engine.lora.where")
        if large := sorted(name for name, adapter in adapters.items() if adapter.a.shape[-1] > most):
            rank = max(adapters[name].a.shape[-1] for name in large)
            raise BadInput(f"rank {rank} is above the maximum of {most}: {', '.join(large[:4])}", hint=f"engine.lora.rank={rank}")
        out: Factors = {}
        for address, factor in self.factors.items():
            shape, at = list(self.arrays[address].shape), factor.stacked + factor.place
            shape[at] = 1
            out[address] = np.zeros(shape, np.dtype(self.dtype))
            for i, name in enumerate(factor.layers):
                if name in adapters:
                    whole = out[address][i] if factor.stacked else out[address]
                    factor.write(whole, name, adapters[name])
        return out

    def put(self, name: str, factors: Factors, *, replace: bool = False) -> Loaded:
        """Loads an adapter under a name. Sequences that use an earlier one of this name finish with that.

        Raises:
            BadInput: the name is taken, or every place is.
        """
        if name in self.loaded and not replace:
            raise BadInput(f"an adapter `{name}` is loaded already", hint="unload it first, or replace it")
        old = self.loaded.get(name)
        free = self._free(old)
        if not free:
            loaded = {one.place for one in self.loaded.values()}
            still = sum(place not in loaded for place, users in self._users.items() if users)
            why = f", {still} of them by adapters that are unloaded and still answer" if still else ""
            hint = "unload one, or have more: engine.lora.adapters=N"
            raise BadInput(f"all {self.settings.adapters} places for adapters are taken{why}", hint=hint)
        place = old.place if old is not None and old.place in free else free[0]
        self.arrays = _placed(self.arrays, factors, np.int32(place))
        self._count += 1
        self.loaded = {**self.loaded, name: Loaded(name, place, self._count)}
        return self.loaded[name]

    def unload(self, name: str) -> None:
        """Unloads an adapter. Requests that use it finish with it; new ones are refused.

        Raises:
            NoAdapter: there is none of this name.
        """
        self.get(name)
        self.loaded = {other: one for other, one in self.loaded.items() if other != name}

    def compile(self) -> None:
        """Compiles the program that loads an adapter: into the first free place, which is zeros."""
        if free := self._free():
            self.arrays = _placed(self.arrays, self.packed({}), np.int32(free[0]))

    def _free(self, besides: Loaded | None = None) -> list[int]:
        """The places that no adapter and no sequence has. besides: an adapter that gives up its own."""
        taken = {one.place for one in self.loaded.values() if one is not besides}
        taken |= {place for place, users in self._users.items() if users}
        return [place for place in range(self.settings.adapters) if place not in taken]

    # ---------------------------------------------------------------- sequences

    def get(self, name: str) -> Loaded:
        """The adapter of this name.

        Raises:
            NoAdapter: there is none.
        """
        if (found := self.loaded.get(name)) is None:
            raise NoAdapter(f"no adapter `{name}` is loaded", hint=nearest(name, self.loaded))
        return found

    def use(self, one: Loaded | None) -> None:
        """A sequence with this adapter begins to wait."""
        if one is not None:
            self._users[one.place] += 1

    def leave(self, one: Loaded | None) -> None:
        """It has ended."""
        if one is not None:
            self._users[one.place] -= 1

    def assign(self, slot: int, one: Loaded | None) -> None:
        """A slot has a new owner, with this adapter."""
        self._places[slot] = -1 if one is None else one.place

    @staticmethod
    def salt(one: Loaded | None, salt: str) -> str:
        """The salt of a sequence's pages: no two adapters share pages, nor does one with the model alone, whatever salts users give."""
        return f"{'' if one is None else one.number}:{salt}"


@partial(jax.jit, donate_argnums=0)
def _placed(arrays: Leaves, new: Leaves, place: Array) -> Leaves:
    """The bank with the factors of one place replaced."""

    def put(whole: Array, part: Array) -> Array:
        axis = next((i for i, (n, one) in enumerate(zip(whole.shape, part.shape)) if n != one), 0)
        return jax.lax.dynamic_update_slice_in_dim(whole, part, place, axis)

    return {address: put(whole, new[address]) for address, whole in arrays.items()}

