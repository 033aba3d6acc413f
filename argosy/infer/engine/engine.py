"""The engine: continuous batching of many requests through one model, each with its own sampling settings.

    engine = Engine(model)
    engine.add(Request(ids, most=64, sampling=Sampling(temperature=0.7), seed=1))
    while engine.busy:
        for event in engine.step():
            ...

A step is one forward pass over the new tokens of all sequences, decoding and prefilling together (`parts.ragged`), then one call of
the sampler. Sampled tokens stay on the device for the next step. The host plans a step while the device computes the previous one
(`infer.engine.scheduler`), so the end of a sequence is seen one step late, and the token that step samples for it is dropped. While no
prompt is computed, `settings.steps` decode steps are one dispatch. With speculation (`infer.speculation.speculate`) a step is read
before the next is planned, and may sample several tokens of a sequence.

Sampling settings are arrays on the device with a row per slot (`infer.sampling.sampler`), so a request with other settings compiles
nothing. The forward pass (`infer.engine.forward`) is compiled for a number of decoding rows and a number of prompt rows, both out of
short lists.

What a request adds to the logits may depend on its answer so far (`infer.sampling.biases`), and so do the tokens that its grammar
allows (`infer.tools.grammar`). Then the host reads the previous step's tokens while the device computes the forward pass, and hands
over biases and masks before the sampler runs.
"""

import time
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.core.progress import Say, telling
from argosy.infer.cpu.views import viewable
from argosy.infer.engine.adapters import Adapters, Loaded, NoAdapter
from argosy.infer.engine.forward import Tables, Whole, forward_of
from argosy.infer.engine.masks import bias_rows, mask_rows, spread
from argosy.infer.engine.memory import (
    Extent,
    check_fits,
    describe_pools,
    home_of,
    mesh_in,
    needs_of,
    reserved,
    room_for_cache,
)
from argosy.infer.engine.packing import Packed, Packing, power, sampled_rows
from argosy.infer.engine.pages import Pages
from argosy.infer.engine.program_store import ProgramStore
from argosy.infer.engine.programs import Program, Programs, described
from argosy.infer.engine.request import Event, Reason, Request, Stats
from argosy.infer.engine.scheduler import Plan, Pool, Scheduler
from argosy.infer.engine.scheduler import Sequence as Scheduled
from argosy.infer.sampling.biases import Bias
from argosy.infer.sampling.sample import Sampling, Seed, stream_data, words_of
from argosy.infer.sampling.sampler import Sampled, biased, fresh, masked, ownership, sample, settled
from argosy.infer.settings import MTP, ROW, EngineSettings
from argosy.infer.speculation.drafts import Around
from argosy.infer.speculation.speculate import Verified, speculation_of
from argosy.infer.tools.grammar import Matcher
from argosy.models.parts.cache import Caches, bytes_of, with_pages_copied
from argosy.models.parts.ragged import rows_share_pages
from argosy.models.parts.weight import Leaves, put, split, variable
from argosy.observe.readable import sized
from argosy.ops.native import library
from argosy.ops.native.products import Panels
from argosy.parallel.scope import scope
from argosy.weights.gguf.blocks import Origin


class Engine:
    """Answers many requests with one model at a time.

    Args:
        model: a decoder module. Its weights are read at each step; with `keeps` at the first step after it was idle, and after
            `swap_weights`. If one was replaced, running sequences are computed again from their first token, and the prefix cache is
            cleared.
        say: called with what is being compiled, if that takes longer than a second.
        keeps: whether weights stay prepared while nothing runs. Not if they are trained meanwhile: views of them would make a
            training step copy what it should reuse.
        draft: the module of the draft model, if the settings ask for one.
        adapters: shared with another engine over this model (`Adapters.beside`); None: its own, if the settings ask for any.
        copies: number of engines like this one in the process; on a CPU they share its memory.
        origin: the blocks of a file that weights were read from: packed, they have fewer bytes.

    Raises:
        BadInput: the cache has no room for one sequence of `context` tokens, the model and its draft model do not fit, or a quantized
            cache would be no smaller.
    """

    def __init__(
        self,
        model: Any,
        settings: EngineSettings | None = None,
        *,
        say: Say | None = None,
        keeps: bool = False,
        draft: Any = None,
        adapters: Adapters | None = None,
        copies: int = 1,
        origin: Origin | None = None,
    ):
        self.model, self.settings, self.say, self.keeps = model, settings or EngineSettings(), say, keeps
        self.variables = {address: variable(model, address) for address in split(model)[1]}
        weights, speculative = self.weights(), self.settings.speculative
        self.home = home_of(weights)
        if viewable(weights):
            library.load(say)
        lora = self.settings.lora
        self.adapters = adapters or (Adapters(lora, model, self.settings.slots) if lora.enabled else None)
        self.stats = Stats()
        self.programs = Programs(self._on_mesh, self._missed)
        with self._on_mesh():
            # Copies share the memory of their weights; packed, each would have its own.
            replace = self._replace if keeps and copies == 1 else None
            how: Any = {"hidden": isinstance(speculative, MTP), "whole": self.settings.steps > 1, "replace": replace}
            how["origin"] = origin
            self.forward = forward_of(model, weights, self.adapters, run=self.programs, **how)
        self.dtype, self.vocab = model.dtype, model.config.vocab
        self.context = min(self.settings.context or model.config.context, model.config.context)
        page, slots = self.settings.page, self.settings.slots
        specs, self.shares = self.forward.specs, rows_share_pages(self.forward.specs, self.context, slack=self.context)
        self.needs = needs_of(specs, self.settings, self.dtype, self.context)
        windows = self.needs.windows
        self.packing = Packing(self.settings, Tables(page, self.needs.pages, tuple(windows)), self.shares)
        around = Around(self.packing, self.context, self.home, self._run, self.programs)
        with self._on_mesh():
            self.speculation = speculation_of(speculative, model, draft, self.forward.specs, around)
        reuse = self.settings.reuse and self.shares
        extent = self._extent(copies)
        check_fits(extent.pages, page, self.context)
        self.pages, self.row = Pages(extent.pages, reuse=reuse), ROW if self.shares else 1
        self.scheduler = Scheduler(
            self.pages,
            page,
            slots,
            self.settings.budget,
            self.settings.beside,
            self.row,
            None if self.shares else 1,
            [Pool(window, Pages(count, reuse=reuse), windows[window].filling) for window, count in extent.windows.items()],
            copies=self.shares and self.speculation is None,
        )
        self._copied = Program(partial(with_pages_copied, specs), donate=0)
        self._empty = lambda: self.needs.empty(slots, extent)
        self._caches: Caches | None = None
        if not viewable(weights):
            # A CPU touches all of the cache to reserve it (0.7 s for 4 GB), which `warm_up` does while programs load.
            self._caches = self.caches
        self.slots = jax.device_put(fresh(slots, self.vocab), self.home)
        if self.speculation is not None:
            self.speculation.drafter.allocate(self.pages.count)
        self._sequences: dict[int, Scheduled] = {}
        self._next = 0
        self._flying: list[tuple[Packed, Sampled | Verified]] = []
        self._events: list[Event] = []
        self._kept: dict[int, list[Event]] = {}
        self._sizes: set[tuple[Any, ...]] = set()
        # Held weakly while nothing runs: a weight that was replaced is not kept in memory.
        self._seen: dict[str, Any] = {}
        self._weights: Any = None
        # Whether nothing can have replaced a weight since they were looked at: with `keeps`, nobody else writes them while it is busy.
        self._looked = False

    @property
    def caches(self) -> Caches:
        """The pools of pages, and the states of recurrent layers."""
        if self._caches is None:
            self._caches = reserved(self.forward.specs, self.home, self._empty, self.programs)
        return self._caches

    @caches.setter
    def caches(self, caches: Caches) -> None:
        self._caches = caches

    @property
    def devices(self) -> list[Any]:
        """The devices of the weights, in the order of their mesh."""
        mesh = mesh_in(self.home)
        return list(next(iter(self.weights().values())).devices()) if mesh is None else list(mesh.devices.flat)

    def _on_mesh(self) -> AbstractContextManager[Any]:
        """The scope of programs over several devices."""
        mesh = mesh_in(self.home)
        return nullcontext() if mesh is None else scope(mesh)

    def _key(self, seed: Seed, row: int) -> Any:
        """The random key of a request, computed on a device of this engine: another one may be busy with a step of its own."""
        device = None if self.home is None else min(self.home.device_set, key=lambda one: one.id)
        words = np.asarray(words_of(seed), np.uint32)
        with nullcontext() if device is None else jax.default_device(device):
            found = self.programs(stream_data, len(words), words, np.asarray([row], np.uint32))
        return found if isinstance(found, jax.ShapeDtypeStruct) else np.asarray(found)[0]

    def _extent(self, copies: int) -> Extent:
        slots, pages = self.settings.slots, self.settings.pages
        if pages is not None:
            return self.needs.extent(slots, pages)
        besides = self.speculation.drafter.page_bytes if self.speculation else 0
        memory = self.settings.memory
        room = room_for_cache(self.weights(), copies, memory)
        return self.needs.fitting(slots, room, mesh_in(self.home), besides, strict=memory is not None)

    def described(self) -> str:
        """What the cache holds, in words."""
        drafter = None if self.speculation is None else self.speculation.drafter.caches
        settings, size = self.settings, sized(bytes_of((self.caches, drafter)))
        tokens = self.pages.count * settings.page
        form = f" in {settings.cache_dtype}" if settings.cache_dtype else ""
        return f"{tokens:,} tokens of {settings.slots} sequences of at most {self.context:,}, {size}{form}"

    def weights(self) -> Leaves:
        """The current weights."""
        return {address: v.get_value() for address, v in self.variables.items()}

    def swap_weights(self, weights: Mapping[str, Any]) -> None:
        """Replaces weights, by address; running answers go on with the new ones from their next token.

        Raises:
            KeyError: no such address. ValueError: another shape.
        """
        put(self.model, dict(weights))
        self._looked = False

    def reset_prefix_cache(self, *, running: bool = False) -> bool:
        """Clears the prefix cache; returns whether it did. Not while sequences run, unless `running` computes those again from their
        first token."""
        if running:
            self._land_all()
            self.scheduler.begin_anew()
        elif not self.scheduler.is_empty:
            return False
        self.scheduler.forget_all()
        return True

    def sleep(self) -> bool:
        """Frees the cache until the next step, for whoever needs the memory meanwhile; programs are kept. Returns whether it did: not
        while sequences run, and not that of a draft model."""
        if self.speculation is not None or not self.reset_prefix_cache():
            return False
        self._land_all()
        self._caches = self._weights = None
        return True

    # ---------------------------------------------------------------- adapters

    def load_adapter(self, name: str, folder: str | Path, *, replace: bool = False) -> None:
        """Loads a PEFT folder as an adapter that requests may name. Running answers go on with what they began with.

        Args:
            replace: another adapter of this name makes room.

        Raises:
            BadInput: it does not fit the model or `settings.lora`, the name is taken, or every place is; nothing is changed.
            Unsupported: it changes the model in another way too (DoRA, biases).
        """
        adapters = self._adapters()
        adapters.put(name, adapters.read(folder), replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter: its running and waiting requests finish with it, and new ones are refused.

        Raises:
            NoAdapter: none of this name is loaded.
        """
        self._adapters().unload(name)

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """The names of the adapters of running sequences, and of waiting ones. Any thread may ask."""
        all_ = [one for one in list(self._sequences.values()) if one.what.request.adapter is not None]
        running, waiting = ({one.what.request.adapter for one in all_ if (one.slot >= 0) == runs} for runs in (True, False))
        return sorted(running), sorted(waiting)

    def _adapters(self) -> Adapters:
        if self.adapters is None:
            raise NoAdapter("this engine takes no adapters", hint="engine.lora.enabled=true")
        return self.adapters

    # ---------------------------------------------------------------- requests

    def add(self, request: Request) -> int:
        """Queues a request; returns its number, which its events carry. An answer is never longer than the context allows.

        Raises:
            BadInput: an empty prompt, ids outside the vocabulary, a prompt that fills the context, a seed of more than 64 bits, more
                than 20 likeliest tokens, no token that is allowed, a grammar over another vocabulary, an adapter that is not loaded.
        """
        request.check(self.vocab, self.context)
        ids = request.tokens
        most = min(request.most, self.context - len(ids))
        adapter = None if request.adapter is None else self._adapters().get(request.adapter)
        sequence = Scheduled(list(ids), most, priority=request.priority, salt=self.salt_of(request))
        key = self._key(request.seed, request.row)
        bias, matcher = Bias(request.sampling, request.ends, self.vocab), None
        if request.grammar is not None:
            if request.grammar.vocab != self.vocab:
                raise BadInput(f"a grammar over {request.grammar.vocab} tokens for a model with {self.vocab}")
            matcher = request.grammar.matcher(request.ends)
        number, self._next = self._next, self._next + 1
        sequence.what = _Wanted(number, request, key, bias, matcher, adapter=adapter)
        if self.adapters is not None:
            self.adapters.use(adapter)
        self._sequences[number] = sequence
        self.scheduler.add(sequence)
        return number

    def salt_of(self, request: Request) -> str:
        """The salt of the pages of a request. Any thread may ask."""
        if self.adapters is None:
            return request.salt
        loaded = None if request.adapter is None else self.adapters.loaded.get(request.adapter)
        return self.adapters.salt(loaded, request.salt)

    def abort(self, number: int) -> bool:
        """Ends a request with an `abort` event; the next step may use its pages. Returns False if it has ended already."""
        ended = self.end(number)
        if ended:
            self._events.append(Event(number, None, 0.0, "abort"))
        return ended

    def end(self, number: int) -> bool:
        """Ends a request without any further event. Returns False if it has ended already."""
        self._kept.pop(number, None)
        sequence = self._sequences.get(number)
        if sequence is not None:
            self._forget(sequence)
        return sequence is not None

    def _replace(self, address: str, packed: Panels) -> None:
        self.variables[address].set_value(packed)

    def _look_for_new_weights(self) -> None:
        """Computes running sequences again and clears the prefix cache, if a weight was replaced since the last step."""
        if self._looked and self.keeps:
            return
        self._looked = True
        # Through `get_value`, looking at 270 weights takes 3 ms a step.
        now = {address: v.get_raw_value() for address, v in self.variables.items()}
        if self._seen and any(self._seen[address]() is not a for address, a in now.items()):
            self._land_all()
            self.scheduler.begin_anew()
            self._weights = None
            self.forward.forget()
        if self._weights is None:
            del now
            self._weights = self.forward.prepared(self.weights())
            self._seen = {address: weakref.ref(v.get_raw_value()) for address, v in self.variables.items()}

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or events have not been returned yet."""
        return bool(self._sequences or self._events or self._flying)

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or runs. Without any, a step may still be in flight, for requests that were ended meanwhile."""
        return bool(self._sequences)

    # ---------------------------------------------------------------- a step

    def step(self) -> list[Event]:
        """Starts the next step, and returns the events of the previous one; with speculation, its own events."""
        self._look_for_new_weights()
        try:
            plan = self.scheduler.plan(self.speculation and self.speculation.room, self._steps())
            if plan:
                self._flying.append(self._dispatch(plan))
            if self._flying and (len(self._flying) > 1 or not plan or self.speculation):
                self._land(*self._flying.pop(0))
        except BaseException:
            # Pages are found from the plan on that is to compute them, and this one may not have.
            self.scheduler.forget_all()
            raise
        events, self._events = self._events, []
        if not self.busy:
            self._looked = False
            if not self.keeps:
                self._weights = None
        return events

    def _steps(self) -> int:
        """Decode steps per dispatch: one if the host must see each token of a running sequence."""
        if self.settings.steps > 1:
            wanted = (sequence.what for sequence in self.scheduler.running)
            if any(one.bias.changes or one.matcher is not None for one in wanted):
                return 1
        return self.settings.steps

    def run(self) -> Iterator[Event]:
        """Steps until every request has ended."""
        while self.busy:
            yield from self.step()

    def collect(self, numbers: Collection[int]) -> list[Event]:
        """Steps until one of these requests has an event. Events of others are kept until somebody collects them, so several callers
        may share an engine."""
        while not (mine := [event for number in numbers for event in self._kept.pop(number, ())]):
            if not self.busy:
                raise RuntimeError(f"requests {sorted(numbers)} have ended")
            for event in self.step():
                self._kept.setdefault(event.id, []).append(event)
        return mine

    def generate(self, requests: Sequence[Request]) -> list[list[Event]]:
        """The events of each of these requests, until all have ended.

        Raises:
            BadInput: as `add`, and then none is queued.
        """
        found: dict[int, list[Event]] = {}
        try:
            for request in requests:
                found[self.add(request)] = []
            open_ = set(found)
            while open_:
                for event in self.collect(open_):
                    found[event.id].append(event)
                    open_ -= {event.id} if event.reason else set()
        finally:
            for number in found:
                self.end(number)
        return list(found.values())

    def _land_all(self) -> None:
        while self._flying:
            self._land(*self._flying.pop(0))

    def _land(self, step: Packed, out: Sampled | Verified) -> None:
        """Reads what a step sampled."""
        places: list[tuple[Scheduled, Any]] = [(sequence, i) for i, sequence in enumerate(step.due)]
        if step.counts:
            places = [(sequence, (at, i)) for sequence, i in places for at in range(step.counts[i])]
        if isinstance(out, Verified):
            assert self.speculation is not None
            places, out = self.speculation.landed(self.scheduler, step, out), out.sampled
        tokens, logprobs, drawn = (np.asarray(a) for a in out[:3])
        for sequence, at in places:
            if sequence.done:
                continue
            top, count = (), sequence.what.request.top
            if count:
                top = tuple(zip(np.asarray(out.ids[at])[:count].tolist(), np.asarray(out.likeliest[at])[:count].tolist()))
            self._learn(sequence, int(tokens[at]), float(logprobs[at]), float(drawn[at]), top)

    def _learn(self, sequence: Scheduled, token: int, logprob: float, drawn: float, top: Any) -> None:
        wanted: _Wanted = sequence.what
        self.scheduler.learned(sequence, token)
        self.stats.drawn_tokens += 1
        answer = len(sequence.tokens) - sequence.prompt
        reason: Reason | None = None
        if token in wanted.request.ends:
            reason = "stop"
        elif wanted.matcher is not None and wanted.matcher.push(token):
            self._events.append(Event(wanted.number, token, logprob, None, drawn, top, sequence.reused))
            return self._close(sequence, "stop")
        elif answer == sequence.most:
            reason = "length"
        elif wanted.request.repetition is not None and wanted.request.repetition(sequence.tokens[sequence.prompt :]):
            reason = "repetition"
        self._events.append(Event(wanted.number, token, logprob, reason, drawn, top, sequence.reused))
        if reason is not None:
            self._forget(sequence)

    def _close(self, sequence: Scheduled, reason: Reason) -> None:
        """Ends an answer without a token."""
        self._events.append(Event(sequence.what.number, None, 0.0, reason, reused=sequence.reused))
        self._forget(sequence)

    def _forget(self, sequence: Scheduled) -> None:
        ended = self._sequences.pop(sequence.what.number, None)
        self.scheduler.end(sequence)
        if self.adapters is not None and ended is not None:
            self.adapters.leave(sequence.what.adapter)

    def warm_up(self, store: ProgramStore | None = None) -> int:
        """Compiles every program that a step may need, or reads it from a store; returns their number. Later requests compile nothing.
        Of the model, one token is computed.

        Args:
            store: compiled programs of earlier starts; those that it lacks are added.

        Raises:
            RuntimeError: requests are running.
        """
        if self.busy:
            raise RuntimeError("warm_up is for an engine without requests")
        self._look_for_new_weights()
        before, seconds, start = self.stats.compilations, self.stats.compile_seconds, time.monotonic()
        with self.programs.ahead(store, self.say):
            with self._describing():
                self._call_all()
            self._caches = self.caches
        # What is no program of ours is compiled by the first request otherwise: random keys, copies to the host.
        step = next(iter(self.packing.every()))
        for a in self._computed(step)[:3]:
            np.asarray(a)
        if self.adapters is not None:
            self._run("the loading of adapters", self.adapters.compile, ("adapters",))
        self._settled(self.settings.slots, Sampling(), self._key(0, 0), 0, [0], [])
        if not self.keeps:
            self._weights = None
        self.stats.compile_seconds = seconds + time.monotonic() - start
        return self.stats.compilations - before

    @contextmanager
    def _describing(self) -> Iterator[None]:
        """Descriptions stand in for the caches and the sampler's state."""
        drafter = None if self.speculation is None else self.speculation.drafter
        caches, slots, drafts = self._caches, self.slots, None if drafter is None else drafter.caches
        try:
            self._caches = describe_pools(self.home, self._empty, self.programs) if caches is None else described(caches)
            self.slots = described(slots)
            if drafter is not None:
                drafter.caches = described(drafts)
            yield
        finally:
            self._caches, self.slots = caches, slots
            if drafter is not None:
                drafter.caches = drafts

    def _call_all(self) -> None:
        """Calls every program in every size."""
        self._key(0, 0)
        for step in self.packing.every():
            self._computed(step)
        if self.speculation is not None:
            for step in self.packing.every(self.speculation.ahead):
                self._computed(step)
            self.speculation.drafter.warm_up(self.slots)
        nobody = self.settings.slots
        if self.scheduler.copies:
            self._copy_pages([(-1, -1)])
        for rows in sorted({power(n, 2) for n in range(1, nobody + 1)}):
            self._biased(np.full(rows, nobody, np.int32), np.zeros((rows, self.vocab), np.float32))
        for rows in sorted({sampled_rows(n) for n in range(1, nobody + 1)}):
            self._masked(np.full(rows, nobody, np.int32), np.zeros((rows, -(-self.vocab // 32)), np.int32))
        self._settled(nobody, Sampling(), np.zeros(2, np.uint32), 0, [0], [])

    # ---------------------------------------------------------------- dispatch

    def _dispatch(self, plan: Plan) -> tuple[Packed, Sampled | Verified]:
        begun = [(piece.sequence, piece.start) for piece in plan.pieces]
        begun += [(sequence, len(sequence.tokens) - 1) for sequence in plan.decodes if sequence.copied]
        for sequence, start in begun:
            if sequence.what.slot != (sequence.slot, sequence.preemptions):
                self._settle(sequence)
                self.stats.reused_tokens += start
                self.stats.prompt_tokens += sequence.copied
        self.stats.prompt_tokens += sum(len(piece.tokens) for piece in plan.pieces)
        self._copy_pages(plan.copies)
        step = self.packing(plan) if self.speculation is None else self.speculation.packed(plan, self.slots)
        found = self._computed(step)
        for a in (found.sampled if isinstance(found, Verified) else found)[:3]:
            a.copy_to_host_async()
        self.stats.steps += step.sizes.steps
        return step, found

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages of the cache, before a step reads the copies or writes where they came from."""
        if not copies:
            return
        pages = np.full((2, self.settings.slots), -1, np.int32)
        pages[:, : len(copies)] = np.transpose(copies)
        self.caches = self._run("copies of pages", self._copied, ("pages",), self.caches, *pages)

    def _computed(self, step: Packed) -> Sampled | Verified:
        """The forward pass of a step, then the sampler."""
        if step.sizes.steps > 1:
            return self._several(step)
        if step.drafts is None:
            logits = self._passed(step)
            self._constrain(step.due)
            return self._sampled(logits, step.owners)
        assert self.speculation is not None
        copies = self.speculation.copies(self.caches, step)
        logits = self._passed(step)
        self._constrain(step.due)
        self.slots, found = self.speculation.verified(self.slots, logits, step)
        self.caches = self.speculation.rolled_back(self.caches, copies, step, found)
        return found

    def _passed(self, step: Packed) -> Any:
        """The logits after the picked tokens of a step."""
        sizes, words, picks = step.sizes, step.words, step.picks
        what = f"a step of {sizes.decodes + sizes.drafted} decoding rows and {sizes.rows} x {sizes.width} prompt tokens"
        logits, self.caches, hidden = self._run(
            what, self.forward, (*sizes, len(picks)), self._weights, self.caches, self.slots.last, words, picks, sizes
        )
        if hidden is not None and self.speculation is not None:
            self.speculation.drafter.observe(step, hidden)
        return logits

    def _several(self, step: Packed) -> Sampled:
        """Several decode steps, each with its sampler."""
        assert isinstance(self.forward, Whole)
        self._constrain(step.due)
        sizes, owners = step.sizes, step.owners
        what, program = f"{plural(sizes.steps, 'step')} of {sizes.decodes} decoding rows", self.forward.several
        state = self._weights, self.caches, self.slots, step.words, step.picks, owners
        self.slots, self.caches, found = self._run(what, program, ("several", *sizes, len(owners)), *state, sizes)
        return found

    def _sampled(self, logits: Any, owners: np.ndarray) -> Sampled:
        """Samples a token for each row with an owner."""
        count = len(owners)
        self.slots, sampled = self._run(f"the sampler for {plural(count, 'row')}", sample, (count,), self.slots, logits, owners)
        return sampled

    def _run(self, what: str, program: Any, sizes: tuple[Any, ...], *arguments: Any) -> Any:
        """Calls a program; counts and times the call if it compiles."""
        if isinstance(program, Program):
            program = partial(self.programs, program, sizes)
        if sizes in self._sizes:
            with self._on_mesh():
                return program(*arguments)
        start = time.monotonic()
        with telling(self.say, f"compiling {what}"), self._on_mesh():
            out = program(*arguments)
        self._sizes.add(sizes)
        self.stats.compilations += 1
        self.stats.compile_seconds += time.monotonic() - start
        return out

    def _settle(self, sequence: Scheduled) -> None:
        """Writes the settings and the tokens of a sequence into the sampler's rows of its slot."""
        wanted: _Wanted = sequence.what
        prompt, answer = sequence.tokens[: sequence.prompt], sequence.tokens[sequence.prompt :]
        asked = wanted.request
        self._settled(sequence.slot, asked.sampling, wanted.key, asked.top, prompt, answer)
        wanted.slot = (sequence.slot, sequence.preemptions)
        if self.adapters is not None:
            self.adapters.assign(sequence.slot, wanted.adapter)
        wanted.bias.forget()
        wanted.mask = b""

    def _settled(self, slot: int, *owner: Any) -> None:
        """Gives a slot a new owner; the arguments are those of `sampler.ownership`."""
        with self._on_mesh():
            self.slots = self.programs(settled, "slot", self.slots, *ownership(self.vocab, slot, *owner))

    def _missed(self) -> None:
        self.stats.compilations += 1

    def _constrain(self, due: list[Scheduled]) -> None:
        """Hands over the biases and the masks that have changed, of the sequences that are sampled next."""
        if any(sequence.what.bias.changes or sequence.what.matcher is not None for sequence in due):
            self._land_all()
        nobody = self.settings.slots
        with_grammar = [sequence for sequence in due if sequence.what.matcher is not None and not sequence.done]
        if rows := mask_rows(with_grammar, self.vocab, self._close):
            self._masked(*spread(rows, sampled_rows(len(rows)), nobody))
        if rows := bias_rows([sequence for sequence in due if sequence.what.bias and not sequence.done]):
            self._biased(*spread(rows, power(len(rows), 2), nobody))

    def _masked(self, where: np.ndarray, bits: np.ndarray) -> None:
        self.slots = self._run(f"{len(where)} masks", masked, ("mask", len(where)), self.slots, where, bits)

    def _biased(self, where: np.ndarray, bias: np.ndarray) -> None:
        self.slots = self._run(f"{len(where)} biases", biased, ("bias", len(where)), self.slots, where, bias)


@dataclass(eq=False)
class _Wanted:
    """The engine's data of a sequence. slot: the slot, and the number of preemptions, when the sampler's rows were last written.
    mask: the bits in that slot."""

    number: int
    request: Request
    key: np.ndarray
    bias: Bias
    matcher: Matcher | None = None
    mask: bytes = b""
    slot: tuple[int, int] | None = None
    adapter: Loaded | None = None
