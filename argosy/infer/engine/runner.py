"""The runner: the part of an engine that is on a device, or compiled for one.

It holds the weights, the caches and the sampler's state, and computes one batch at a time: the forward pass, then the sampler. The
forward pass (`infer.forward.passes`) is compiled for a few numbers of decoding rows and of prompt rows. The sampler's state has a row
for each slot (`infer.sampling.sampler`), so a request with other sampling settings compiles nothing. On GPUs there are three programs
of the sampler, which `warm_up` compiles.
"""

import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np

from argosy.core.counts import plural
from argosy.core.progress import Say, telling
from argosy.infer.cpu.panels import check_rounds_data
from argosy.infer.cpu.views import is_on_one_cpu
from argosy.infer.engine.adapters import Adapters
from argosy.infer.engine.batch import BatchBuilder, StepBatch, sampler_rows
from argosy.infer.engine.cache import (
    CacheSize,
    cache_needs,
    check_sequence_fits,
    describe_pools,
    reserve_caches,
    room_for_cache,
)
from argosy.infer.engine.masks import MaskRow, mask_arrays
from argosy.infer.engine.request import EngineStats, Request
from argosy.infer.engine.scheduler import StepPlan
from argosy.infer.engine.state import RequestState
from argosy.infer.forward.passes import OneProgram, forward_of
from argosy.infer.forward.step import PageTables
from argosy.infer.placement import home_mesh, weights_home
from argosy.infer.sampling.sample import Sampling, Seed, seed_words, stream_data
from argosy.infer.sampling.sampler import (
    SamplerFeatures,
    SamplerOutput,
    empty_slots,
    sample,
    slot_row,
    write_masks,
    write_slot,
)
from argosy.infer.settings import MTP, EngineSettings
from argosy.infer.speculation.drafts import DraftContext
from argosy.infer.speculation.speculate import VerifiedTokens, speculation_of
from argosy.models.parts.attention.cache import Caches, bytes_of_caches, with_pages_copied
from argosy.models.parts.attention.ragged import rows_share_pages
from argosy.models.parts.weight import Leaves, put, split, variable
from argosy.observe.readable import format_bytes
from argosy.ops.native import library
from argosy.ops.native.products import Panels
from argosy.ops.programs.programs import Program, Programs, abstract_arrays
from argosy.ops.programs.store import ProgramStore
from argosy.parallel.scope import platform, scope
from argosy.weights.gguf.blocks import Origin


class Runner:
    """The device side of an engine. The arguments are those of `Engine`.

    forward: the forward pass.
    batches: the builder of step arrays.
    programs: the compiled programs.
    slots: the sampler's state.
    speculation: builds and verifies steps with drafts; None without speculation.
    cache_size: number of pages in each pool.
    shares: whether several rows of one step may belong to one request.
    stats: counts since the engine was made.
    """

    def __init__(
        self,
        model: Any,
        settings: EngineSettings,
        *,
        say: Say | None,
        exclusive: bool,
        draft: Any,
        adapters: Adapters | None,
        copies: int,
        origin: Origin | None,
    ):
        self.model, self.settings, self.say, self.exclusive, self.adapters = model, settings, say, exclusive, adapters
        self.variables = {address: variable(model, address) for address in split(model)[1]}
        weights, speculative = self.weights(), settings.speculative
        self.home, self.on_cpu = weights_home(weights), is_on_one_cpu(weights)
        if self.on_cpu:
            library.load(say)
        if settings.activations is not None:
            check_rounds_data(model, weights, origin)
        self.stats = EngineStats()
        self.programs = Programs(self.on_mesh, self._count_compilation)
        with self.on_mesh():
            # Copies of a model share the memory of their weights. With packed weights, each copy would have its own.
            replace = self._replace if exclusive and copies == 1 else None
            options: Any = {"hidden": isinstance(speculative, MTP), "run": self.programs, "activations": settings.activations}
            self.forward = forward_of(
                model, weights, adapters, whole=settings.steps > 1, replace=replace, origin=origin, **options
            )
        self.vocab, self.context = model.config.vocab, min(settings.context or model.config.context, model.config.context)
        specs = self.forward.specs
        self.shares = rows_share_pages(specs, self.context, slack=self.context)
        self.needs = cache_needs(specs, settings, model.dtype, self.context)
        tables = PageTables(settings.page, self.needs.pages, tuple(self.needs.windows))
        self.batches = BatchBuilder(settings, tables, self.shares, model.config.width)
        draft_context = DraftContext(self.batches, self.context, self.home, self.run, self.programs)
        with self.on_mesh():
            self.speculation = speculation_of(speculative, model, draft, specs, draft_context)
        self.cache_size = self._cache_size(copies)
        check_sequence_fits(self.cache_size.pages, settings.page, self.context)
        self._copied = Program(partial(with_pages_copied, specs), donate=0)
        # To reserve the cache, a CPU writes all of it (0.7 s for 4 GB). `warm_up` does this while programs load.
        self._caches: Caches | None = None if self.on_cpu else self._allocated()
        self.slots = jax.device_put(empty_slots(settings.slots, self.vocab), self.home)
        # On GPUs, the `SamplerFeatures` of each slot's owner. On other devices one program handles all settings.
        with self.on_mesh():
            self._slot_features = np.zeros(settings.slots, np.int32) if platform() == "gpu" else None
        if self.speculation is not None:
            self.speculation.drafter.allocate(self.cache_size.pages)
        self._sizes: set[tuple[Any, ...]] = set()
        # Weak references, so that a weight that was replaced is not kept in memory.
        self._previous: dict[str, Any] = {}
        self._prepared: Any = None
        # Whether no weight can have been replaced since the last comparison. While the engine is busy, only `swap_weights` replaces
        # weights of an exclusive model.
        self._unchanged = False

    # ---------------------------------------------------------------- weights

    def weights(self) -> Leaves:
        """The current weights, by parameter name."""
        return {address: v.get_value() for address, v in self.variables.items()}

    def swap_weights(self, weights: Mapping[str, Any]) -> None:
        """Replaces weights, as `Engine.swap_weights`."""
        put(self.model, dict(weights))
        self._unchanged = False

    def refresh_weights(self, restart: Callable[[], None]) -> None:
        """Prepares the model's current weights for the forward pass, if they are not prepared yet or a weight was replaced.

        Args:
            restart: called before, if a weight was replaced since the last step.
        """
        if self._unchanged and self.exclusive:
            return
        self._unchanged = True
        # `get_raw_value`, because reading 270 weights with `get_value` takes 3 ms a step.
        now = {address: v.get_raw_value() for address, v in self.variables.items()}
        if self._previous and any(self._previous[address]() is not a for address, a in now.items()):
            restart()
            self._prepared = None
            self.forward.forget()
        if self._prepared is None:
            del now
            self._prepared = self.forward.prepared(self.weights())
            self._previous = {address: weakref.ref(v.get_raw_value()) for address, v in self.variables.items()}

    def rest(self) -> None:
        """Called when the engine becomes idle. Frees the prepared views and copies of the weights, unless the model is exclusive."""
        self._unchanged = False
        if not self.exclusive:
            self._prepared = None

    def _replace(self, address: str, panels: Panels) -> None:
        self.variables[address].set_value(panels)

    # ---------------------------------------------------------------- devices and caches

    @property
    def devices(self) -> list[Any]:
        """The devices of the weights, in the order of their mesh."""
        mesh = home_mesh(self.home)
        return list(next(iter(self.weights().values())).devices()) if mesh is None else list(mesh.devices.flat)

    def on_mesh(self) -> AbstractContextManager[Any]:
        """A context manager for tracing programs over the mesh; it does nothing on one device."""
        mesh = home_mesh(self.home)
        return nullcontext() if mesh is None else scope(mesh)

    @property
    def caches(self) -> Caches:
        """The page pools and the states of recurrent layers, allocated at the first access."""
        if self._caches is None:
            self._caches = self._allocated()
        return self._caches

    @caches.setter
    def caches(self, caches: Caches) -> None:
        self._caches = caches

    def free_caches(self) -> None:
        """Frees the caches and the prepared weights until the next step."""
        self._caches = self._prepared = None

    def _allocated(self) -> Caches:
        return reserve_caches(self.forward.specs, self.home, self._empty_caches, self.programs)

    def _empty_caches(self) -> Caches:
        return self.needs.empty(self.settings.slots, self.cache_size)

    def _cache_size(self, copies: int) -> CacheSize:
        slots, pages, memory = self.settings.slots, self.settings.pages, self.settings.memory
        if pages is not None:
            return self.needs.size(slots, pages)
        drafter = self.speculation.drafter.page_bytes if self.speculation else 0
        room = room_for_cache(self.weights(), copies, memory)
        return self.needs.fitting(slots, room, home_mesh(self.home), drafter, strict=memory is not None)

    def describe_cache(self) -> str:
        """Describes the size of the cache as text."""
        drafter = None if self.speculation is None else self.speculation.drafter.caches
        settings, size = self.settings, format_bytes(bytes_of_caches((self.caches, drafter)))
        form = f" in {settings.cache_dtype}" if settings.cache_dtype else ""
        tokens = self.cache_size.pages * settings.page
        return f"{tokens:,} tokens of {settings.slots} sequences of at most {self.context:,}, {size}{form}"

    # ---------------------------------------------------------------- a request

    def check_inputs(self, request: Request) -> None:
        """Checks the inputs that a prompt has besides its token ids.

        Raises:
            BadInput: they do not fit the prompt or the model.
        """
        if request.inputs is not None:
            request.inputs.check(len(request.tokens), self.batches.width, self.model.layers.rotary_axes())

    def random_key(self, seed: Seed, row: int) -> Any:
        """The data of a request's random key [2]. It is computed on a device of this engine, because the default device may be busy
        with a step of another engine."""
        device = None if self.home is None else min(self.home.device_set, key=lambda device: device.id)
        words = np.asarray(seed_words(seed), np.uint32)
        with nullcontext() if device is None else jax.default_device(device):
            keys = self.programs(stream_data, len(words), words, np.asarray([row], np.uint32))
        return keys if isinstance(keys, jax.ShapeDtypeStruct) else np.asarray(keys)[0]

    def write_slot(self, state: RequestState) -> None:
        """Writes the sampling settings and the token counts of a request into its slot's row of the sampler's state, and sets the
        slot's adapter."""
        request, scheduled, limits = state.request, state.scheduled, state.restrictions
        prompt, completion = scheduled.tokens[: scheduled.prompt], scheduled.completion
        # A grammar's mask is written before the request is sampled.
        mask = limits.bits(completion) if limits and state.matcher is None else None
        if self._slot_features is not None:
            has_mask = mask is not None or state.matcher is not None
            self._slot_features[scheduled.slot] = SamplerFeatures.by(request.sampling, request.top, mask=has_mask)
        self._write_slot(scheduled.slot, request.sampling, state.random_key, request.top, prompt, completion, mask)
        state.slot, state.mask = (scheduled.slot, scheduled.preemptions), b"" if mask is None else mask.tobytes()
        if self.adapters is not None:
            self.adapters.assign(scheduled.slot, state.adapter)

    def _write_slot(self, slot: int, *owner: Any) -> None:
        """Writes the row of a slot's new owner into the sampler's state. `owner` are the arguments of `slot_row`."""
        with self.on_mesh():
            self.slots = self.programs(write_slot, "slot", self.slots, np.int32(slot), slot_row(self.vocab, *owner))

    def write_masks(self, rows: Sequence[MaskRow]) -> None:
        """Writes token masks into the sampler's state."""
        if rows:
            self._write_masks(*mask_arrays(rows, sampler_rows(len(rows)), self.settings.slots))

    def _write_masks(self, slots: np.ndarray, bits: np.ndarray) -> None:
        self.slots = self.run(f"{len(slots)} masks", write_masks, ("mask", len(slots)), self.slots, slots, bits)

    # ---------------------------------------------------------------- a step

    def dispatch(self, plan: StepPlan, constrain: Callable[[StepBatch], None]) -> tuple[StepBatch, SamplerOutput | VerifiedTokens]:
        """Starts a step. Returns its batch and the sampled tokens, whose copy to the host has been started.

        Args:
            constrain: called with the batch before the sampler runs, while the device computes the forward pass.
        """
        self._copy_pages(plan.copies)
        batch = self.batches.build(plan) if self.speculation is None else self.speculation.build(plan, self.slots)
        out = self.compute(batch, constrain)
        for a in (out.sampled if isinstance(out, VerifiedTokens) else out)[:3]:
            a.copy_to_host_async()
        self.stats.steps += batch.sizes.steps
        return batch, out

    def compute(
        self,
        batch: StepBatch,
        constrain: Callable[[StepBatch], None] = lambda _: None,
        features: SamplerFeatures | None = None,
    ) -> SamplerOutput | VerifiedTokens:
        """Runs the forward pass of a step, then the sampler. Updates the caches and the sampler's state.

        Args:
            constrain: as in `dispatch`.
            features: the sampling settings that the sampler's program handles; None: those that the batch's requests use.
        """
        if batch.sizes.steps > 1:
            constrain(batch)
            return self._several(batch, features)
        if batch.drafts is None:
            logits = self._logits(batch)
            constrain(batch)
            return self._sampled(logits, batch.owners, features)
        assert self.speculation is not None
        states = self.speculation.copied_states(self.caches, batch)
        logits = self._logits(batch)
        constrain(batch)
        self.slots, out = self.speculation.verified(self.slots, logits, batch)
        self.caches = self.speculation.rolled_back(self.caches, states, batch, out)
        return out

    def _copy_pages(self, copies: Collection[tuple[int, int]]) -> None:
        """Copies cache pages, each given as (source, target). It runs before the step that reads the copies or writes to the
        sources."""
        if not copies:
            return
        pages = np.full((2, self.settings.slots), -1, np.int32)
        pages[:, : len(copies)] = np.transpose(list(copies))
        self.caches = self.run("copies of pages", self._copied, ("pages",), self.caches, *pages)

    def _logits(self, batch: StepBatch) -> Any:
        """Runs the forward pass of a step. Returns the logits at the picked tokens."""
        sizes, words, picks = batch.sizes, batch.words, batch.picks
        label = f"a step of {sizes.decodes + sizes.drafted} decoding rows and {sizes.rows} x {sizes.width} prompt tokens"
        arguments = self._prepared, self.caches, self.slots.last, words, picks, sizes, batch.embeddings
        logits, self.caches, hidden = self.run(label, self.forward.step, (*sizes, len(picks)), *arguments)
        if hidden is not None and self.speculation is not None:
            self.speculation.drafter.observe(batch, hidden)
        return logits

    def _several(self, batch: StepBatch, features: SamplerFeatures | None) -> SamplerOutput:
        """Runs several decode steps in one dispatch, each with the sampler."""
        assert isinstance(self.forward, OneProgram)
        sizes, owners = batch.sizes, batch.owners
        features = self._features_of(owners) if features is None else features
        if features is not SamplerFeatures.TEMPERATURE:
            features = SamplerFeatures.ALL  # only two programs, because each contains the whole model
        label, program = f"{plural(sizes.steps, 'step')} of {sizes.decodes} decoding rows", self.forward.several
        state = self._prepared, self.caches, self.slots, batch.words, batch.picks, owners
        self.slots, self.caches, out = self.run(label, program, ("several", *sizes, len(owners), features), *state, sizes, features)
        return out

    def _sampled(self, logits: Any, owners: np.ndarray, features: SamplerFeatures | None) -> SamplerOutput:
        """Samples a token for each row of logits with an owner."""
        count, features = len(owners), self._features_of(owners) if features is None else features
        label = f"the sampler for {plural(count, 'row')}"
        self.slots, out = self.run(label, sample, (count, features), self.slots, logits, owners, features)
        return out

    def _features_of(self, owners: np.ndarray) -> SamplerFeatures:
        """The smallest `SamplerFeatures` that handle the requests in these slots."""
        if self._slot_features is None:
            return SamplerFeatures.ALL
        return SamplerFeatures(max(self._slot_features[owners[owners >= 0]], default=0))

    # ---------------------------------------------------------------- programs

    def run(self, label: str, program: Any, sizes: tuple[Any, ...], *arguments: Any) -> Any:
        """Calls a program. The first call with these sizes is counted and timed as a compilation.

        Args:
            label: the program's name for `say`.
            sizes: stand for the shapes of the arguments.
        """
        if isinstance(program, Program):
            program = partial(self.programs, program, sizes)
        if sizes in self._sizes:
            with self.on_mesh():
                return program(*arguments)
        start = time.monotonic()
        with telling(self.say, f"compiling {label}"), self.on_mesh():
            out = program(*arguments)
        self._sizes.add(sizes)
        self.stats.compilations += 1
        self.stats.compile_seconds += time.monotonic() - start
        return out

    def _count_compilation(self) -> None:
        self.stats.compilations += 1

    def warm_up(self, store: ProgramStore | None, *, copies: bool) -> int:
        """As `Engine.warm_up`. `refresh_weights` must have been called before.

        Args:
            copies: whether the scheduler may have pages copied.
        """
        before, seconds, start = self.stats.compilations, self.stats.compile_seconds, time.monotonic()
        self.prepare_programs(store, copies=copies)
        # JAX compiles its internal programs, for random keys and copies to the host, at their first use.
        for a in self.compute(next(iter(self.batches.all_batches())))[:3]:
            np.asarray(a)
        if self.adapters is not None:
            self.run("the loading of adapters", self.adapters.compile, ("adapters",))
        self._write_slot(self.settings.slots, Sampling(), self.random_key(0, 0), 0, [0], [])
        if not self.exclusive:
            self._prepared = None
        self.stats.compile_seconds = seconds + time.monotonic() - start
        return self.stats.compilations - before

    def prepare_programs(self, store: ProgramStore | None, *, copies: bool) -> None:
        """Loads or compiles every program in every size, and allocates the caches at the same time."""
        with self.programs.ahead(store, self.say):
            with self._described():
                self._call_all(copies)
            self._caches = self.caches

    @contextmanager
    def _described(self) -> Iterator[None]:
        """Inside, descriptions of shapes replace the caches and the sampler's state."""
        drafter = None if self.speculation is None else self.speculation.drafter
        caches, slots, drafts = self._caches, self.slots, None if drafter is None else drafter.caches
        try:
            self._caches = describe_pools(self.home, self._empty_caches, self.programs) if caches is None else abstract_arrays(caches)
            self.slots = abstract_arrays(slots)
            if drafter is not None:
                drafter.caches = abstract_arrays(drafts)
            yield
        finally:
            self._caches, self.slots = caches, slots
            if drafter is not None:
                drafter.caches = drafts

    def _call_all(self, copies: bool) -> None:
        self.random_key(0, 0)
        for batch in self.batches.all_batches():
            for features in (SamplerFeatures.ALL,) if self._slot_features is None else SamplerFeatures:
                self.compute(batch, features=features)
        if self.speculation is not None:
            for batch in self.batches.all_batches(self.speculation.draft_width):
                self.compute(batch)
            self.speculation.drafter.warm_up(self.slots)
        no_slot = self.settings.slots
        if copies:
            self._copy_pages([(-1, -1)])
        for rows in sorted({sampler_rows(n) for n in range(1, no_slot + 1)}):
            self._write_masks(np.full(rows, no_slot, np.int32), np.zeros((rows, -(-self.vocab // 32)), np.int32))
        self._write_slot(no_slot, Sampling(), np.zeros(2, np.uint32), 0, [0], [])
