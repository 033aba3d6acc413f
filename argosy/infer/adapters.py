"""The low-rank adapters of an engine: loaded and unloaded while it runs, and another one for each sequence (multi-LoRA).

All of them together are one pair of arrays for each contraction (`adapt.bank`), with places for a fixed number of adapters of a fixed
rank. Loading writes into a place, in one program, so nothing is compiled after warm-up. An adapter that is unloaded or replaced keeps its
place until the sequences that use it have ended; a new one takes a free place.
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
            BadInput: nothing that matches can carry adapters.
        """
        graph, leaves = split(model)
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
        """Takes down the addresses of the model with banks."""
        names = layer_addresses(out)
        own = variables(out)
        # {address of a factor: the per-layer names of its contraction}.
        self.factors = {f"{name}.{f}": [one.removesuffix(".a") for one in names(f"{name}.a")] for name in banks for f in "ab"}
        self.chosen = {address: v.shape[:-2] for address, v in own.items() if isinstance(v, Chosen)}
        self.base = {address: address for address in own.keys() - self.factors.keys() - self.chosen.keys()}
        for address in self.base:
            for name in (name for name in banks if address.startswith(f"{name}.of.")):
                self.base[address] = f"{name}.{address.removeprefix(f'{name}.of.')}"
        self._axes = {f"{name}.{f}": (of.stacked + (len(of.group + of.inner) if f == "a" else len(of.group))) for name, of in banks.items() for f in "ab"}
        self.arrays = {address: jnp.zeros(own[address].shape, self.dtype) for address in self.factors}
        self._carrying = {name for names in self.factors.values() for name in names}

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
            raise BadInput(what, hint=f"`engine.lora.where` is `{self.settings.where}`; {nearest(strange[0], self._carrying) or 'merge it'}")
        if large := sorted(name for name, adapter in adapters.items() if adapter.a.shape[-1] > most):
            ranks = max(adapters[name].a.shape[-1] for name in large)
            raise BadInput(f"rank {ranks} is above the maximum of {most}: {', '.join(large[:4])}", hint=f"engine.lora.rank={ranks}")
        out: Factors = {}
        for address, names in self.factors.items():
            array, axis, factor = self.arrays[address], self._axes[address], address[-1]
            shape = (*array.shape[:axis], 1, *array.shape[axis + 1 :])
            out[address] = np.zeros(shape, np.dtype(self.dtype))
            stacked = bool(names != [address[:-2]])
            for i, name in enumerate(names):
                if name in adapters:
                    self._write(out[address][i] if stacked else out[address], axis - stacked, factor, name, adapters[name])
        return out

    def _write(self, into: np.ndarray, axis: int, factor: str, name: str, adapter: Adapter) -> None:
        rank = adapter.a.shape[-1]
        values = np.asarray(adapter.a if factor == "a" else np.float32(adapter.gain) * adapter.b, np.float32)
        place = into[(*[slice(None)] * axis, 0, *[slice(None)] * 0)]
        place = place[(*[slice(None)] * axis, slice(rank))]
        if place.shape != values.shape:
            raise BadInput(f"{name}: factors of {values.shape} for a weight that takes {place.shape}")
        if not np.isfinite(values).all():
            raise BadInput(f"{name}: the adapter has numbers that are not finite")
        place[...] = values

    def put(self, name: str, factors: Factors, *, replace: bool = False) -> Loaded:
        """Loads an adapter under a name. Sequences that use an earlier one of this name finish with that.

        Raises:
            BadInput: the name is taken, or every place is.
        """
        if name in self.loaded and not replace:
            raise BadInput(f"an adapter `{name}` is loaded already", hint="unload it first, or replace it")
        old = self.loaded.get(name)
        taken = {one.place for one in self.loaded.values() if one is not old} | {p for p, n in self._users.items() if n}
        free = [place for place in range(self.settings.adapters) if place not in taken]
        if not free:
            still = sum(n > 0 and p not in {one.place for one in self.loaded.values()} for p, n in self._users.items())
            why = f", {still} of them by adapters that are unloaded and still answer" if still else ""
            raise BadInput(f"all {self.settings.adapters} places for adapters are taken{why}", hint="unload one, or more places: engine.lora.adapters=N")
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
        taken = {one.place for one in self.loaded.values()} | {p for p, n in self._users.items() if n}
        if free := [place for place in range(self.settings.adapters) if place not in taken]:
            self.arrays = _placed(self.arrays, self.packed({}), np.int32(free[0]))

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

