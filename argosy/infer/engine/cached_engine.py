"""Keeps the engine and the forward passes built from a module between calls, and builds them again when the module's structure changes.

Splitting a module of 270 weights takes 15 ms, walking it 1 ms. The walk collects the identity of every variable and attribute. Surgery,
adapters and another dtype are noticed, because each replaces an object. The values of weights are not collected: new weights are used
at once, and replaced ones are not kept in memory.
"""

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from argosy.core.progress import Say
from argosy.infer.engine.adapters import Adapters, UnknownAdapter
from argosy.infer.engine.cache import CacheNeeds, CacheSize, cache_needs, check_sequence_fits, room_for_cache
from argosy.infer.engine.engine import Engine
from argosy.infer.forward.sequences import SequenceScorer
from argosy.infer.placement import weights_mesh
from argosy.infer.settings import EngineSettings
from argosy.models.parts.weight import variables
from argosy.weights.gguf.blocks import Origin
from argosy.weights.peft.reader import read_adapter
from argosy.weights.peft.sites import Adapter


class EngineRoom(NamedTuple):
    """The sizes of an engine.

    slots: number of sequences that run at a time.
    context: the most tokens of one sequence.
    pages: number of KV-cache pages for all sequences.
    """

    slots: int = 1
    context: int = 512
    pages: int = 0

    def grown(self, lengths: Sequence[int], most: int, settings: EngineSettings) -> "EngineRoom":
        """Returns sizes that also have room for sequences of these lengths. Sizes grow by large factors, because each is compiled.

        Args:
            lengths: tokens of each sequence, prompt and completion.
            most: the most tokens that a sequence may have.
        """
        slots, context = self.slots, min(self.context, most)
        while slots < min(len(lengths), settings.slots):
            slots = min(slots * 8, settings.slots)
        while context < max(lengths):
            context = min(context * 4, most)
        if settings.pages is not None:
            return EngineRoom(slots, context, settings.pages)
        needed = sum(sorted((-(-length // settings.page) for length in lengths), reverse=True)[:slots])
        pages = max(self.pages, -(-context // settings.page))
        while pages < needed:
            pages *= 2
        return EngineRoom(slots, context, pages)


class EngineParts(NamedTuple):
    """The parts that an engine is built from.

    module: the module of the model.
    settings: the engine's settings.
    draft: the module of the draft model, if the settings ask for one.
    origin: the quantized blocks of the GGUF file that the module's weights were read from; None: read from another file.
    """

    module: Any
    settings: EngineSettings = EngineSettings()
    draft: Any = None
    origin: Origin | None = None

    @property
    def longest(self) -> int:
        """The most tokens of a sequence, prompt and completion."""
        context = self.module.config.context
        return min(self.settings.context or context, context)


class EngineCache:
    """Keeps the engine and the forward passes built from a module in its current structure. Loaded adapters are kept when the structure
    changes."""

    def __init__(self) -> None:
        self._identities: list[Any] = []
        self._sequences: SequenceScorer | None = None
        self._adapted: SequenceScorer | None = None
        self._engine: Engine | None = None
        self._room = EngineRoom()
        self._loaded: dict[str, Mapping[str, Adapter]] = {}

    def sequences(self, parts: EngineParts, say: Say | None = None) -> SequenceScorer:
        """The forward pass over whole sequences."""
        self._look(parts)
        if self._sequences is None:
            self._sequences = SequenceScorer(parts.module)
        self._sequences.say = say
        return self._sequences

    # ---------------------------------------------------------------- adapters

    def adapted(self, parts: EngineParts, say: Say | None = None) -> tuple[SequenceScorer, Adapters]:
        """The forward pass over whole sequences with adapters, and the adapters that are loaded into it.

        Raises:
            UnknownAdapter: adapters are not enabled in the settings.
            BadInput: an adapter that was loaded does not fit the module as it is now.
        """
        if not parts.settings.lora.enabled:
            raise UnknownAdapter("there is no room for adapters", hint='argosy.load(MODEL, engine={"lora": {"enabled": True}})')
        self._look(parts)
        if self._adapted is None:
            adapters = Adapters(parts.settings.lora, parts.module, 1)
            adapted = SequenceScorer(parts.module, adapters=adapters, whole=parts.settings.steps > 1)
            for name, factors in self._loaded.items():
                adapters.put(name, adapters.packed(factors))
            self._adapted = adapted
        self._adapted.say = say
        assert self._adapted.adapters is not None
        return self._adapted, self._adapted.adapters

    @property
    def loaded(self) -> Mapping[str, Mapping[str, Adapter]]:
        """The factors of each loaded adapter by per-layer name, by the adapter's name."""
        return self._loaded

    def load_adapter(self, parts: EngineParts, name: str, folder: str | Path, *, replace: bool) -> None:
        """Loads an adapter, as `Engine.load_adapter`. The contents of the folder stay in memory, so that it can be loaded again after
        surgery.
        """
        _, adapters = self.adapted(parts)
        factors = read_adapter(folder, parts.module.config)
        adapters.put(name, adapters.packed(factors), replace=replace)
        self._loaded[name] = factors

    def unload_adapter(self, parts: EngineParts, name: str) -> None:
        """Unloads an adapter, as `Engine.unload_adapter`."""
        self.adapted(parts)[1].unload(name)
        del self._loaded[name]

    # ---------------------------------------------------------------- the engine

    def engine(self, parts: EngineParts, lengths: Sequence[int], say: Say | None = None) -> Engine:
        """Returns an engine with room for each of these sequences. If all of them do not fit at the same time, some wait.

        The engine is replaced by a larger one while requests run only if a sequence would not fit, and these requests end. Its slots
        and its context grow up to those of the settings. If the settings give a number of pages, it has this number from the start.

        Args:
            lengths: tokens of each sequence, prompt and completion.

        Raises:
            BadInput: as `Engine`.
        """
        self._look(parts)
        module, settings, draft, origin = parts
        if settings.pages is not None:
            check_sequence_fits(settings.pages, settings.page, parts.longest)
        room = self._room.grown(lengths, parts.longest, settings)
        fits = max(lengths) <= self._room.context
        if self._engine is None or (room != self._room and not (fits and self._engine.has_requests)):
            self._engine = None  # frees its cache before the next one is allocated
            pages = settings.pages or min(room.pages, _pages_for(parts, room))
            engine_settings = settings.model_copy(update={"slots": room.slots, "pages": pages, "context": room.context})
            shared = self.adapted(parts)[1].for_engine(room.slots) if settings.lora.enabled else None
            self._engine, self._room = Engine(module, engine_settings, draft=draft, adapters=shared, origin=origin), room
        self._engine.say = say
        return self._engine

    def reset_prefix_cache(self) -> None:
        """Clears the prefix cache, so that the next completions do not depend on earlier ones."""
        if self._engine is not None:
            self._engine.reset_prefix_cache()

    def sleep(self) -> None:
        """Frees the KV cache of an idle engine until its next step. Compiled programs are kept."""
        if self._engine is not None:
            self._engine.sleep()

    def forget(self) -> None:
        """Frees the engine, with its KV cache and its compiled programs."""
        self._engine, self._room = None, EngineRoom()

    def _look(self, parts: EngineParts) -> None:
        identities = [parts.settings, parts.draft, *module_identities(parts.module)]
        if len(identities) != len(self._identities) or not all(map(operator.is_, identities, self._identities)):
            self._identities, self._sequences, self._adapted = identities, None, None
            self.forget()


def _pages_for(parts: EngineParts, room: EngineRoom) -> int:
    """The number of KV-cache pages for an engine of these sizes that fits into memory."""
    module, settings, draft, _ = parts
    weights = {address: v.get_value() for address, v in variables(module).items()}
    mesh, besides = weights_mesh(weights), 0
    if draft is not None:
        besides = CacheNeeds(draft.layers.holds(), settings.page, draft.dtype, room.context, {}).bytes(mesh, CacheSize(1, {}))
    needs = cache_needs(module.layers.holds(), settings, module.dtype, room.context)
    space = room_for_cache(weights, memory=settings.memory)
    return needs.fitting(room.slots, space, mesh, besides, strict=settings.memory is not None).pages


def module_identities(module: Any) -> list[Any]:
    """Every object that a module consists of, in the order of its attributes: for weights the variables, not their values. The list
    keeps the objects alive, so that no identity is reused."""
    out: list[Any] = []
    inside: set[int] = set()

    def walk(node: Any) -> None:
        out.append(node)
        if isinstance(node, nnx.Variable):
            out.extend(node.get_metadata().values())
        elif isinstance(node, nnx.Module | dict | list | tuple) and id(node) not in inside:
            inside.add(id(node))
            for name, value in _children(node):
                out.append(name)
                walk(value)

    walk(module)
    return out


def _children(node: Any) -> Any:
    if isinstance(node, nnx.Module):
        return vars(node).items()
    return node.items() if isinstance(node, dict) else ((None, value) for value in node)
