"""The engine: continuous batching of many requests through one model, each with its own sampling settings.

    engine = Engine(model)
    engine.add(Request(ids, max_tokens=64, sampling=Sampling(temperature=0.7), seed=1))
    while engine.busy:
        for event in engine.step():
            ...

    Request          a prompt and how to complete it, checked in `add`
    RequestState     the engine's state of a request (`engine.state`)
    Scheduler        plans a step: which requests take part, with how many tokens, in which KV-cache pages
    Runner           computes the step on the device
    Event            the token that a request got from the step, or its end

A step is one forward pass over the new tokens of all sequences, decoding and prefilling together, then one call of the sampler.
Sampled tokens stay on the device for the next step. The host plans a step while the device computes the previous one. So the host sees
the end of a sequence one step late, and drops the token that this step samples for the sequence. While no prompt is computed, one
dispatch runs `settings.steps` decode steps. With speculation (`infer.speculation.speculate`) the host reads a step before it plans the
next, and a step may sample several tokens of a sequence.

The next token can be restricted by the completion so far: by bans (`infer.sampling.restrictions`) and by a grammar
(`infer.tools.grammar`). Then the host reads the previous step's tokens while the device computes the forward pass, and writes masks of
the allowed tokens before the sampler runs.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from argosy.core.progress import Say
from argosy.infer.engine.adapters import Adapters, UnknownAdapter
from argosy.infer.engine.batch import StepBatch
from argosy.infer.engine.masks import mask_rows
from argosy.infer.engine.pages import PageKey, PagePool
from argosy.infer.engine.request import Event, FinishReason, Request
from argosy.infer.engine.runner import Runner
from argosy.infer.engine.scheduled import ScheduledRequest
from argosy.infer.engine.scheduler import Scheduler, StepPlan, WindowPool
from argosy.infer.engine.state import RequestState, new_state
from argosy.infer.sampling.sampler import SamplerOutput
from argosy.infer.settings import ROW, EngineSettings
from argosy.infer.speculation.speculate import VerifiedTokens
from argosy.models.parts.weight import Leaves
from argosy.ops.programs.store import ProgramStore
from argosy.weights.gguf.blocks import Origin


class Engine:
    """Completes many requests at the same time with one model.

    Args:
        model: a decoder module. The engine looks for replaced weights at each step. If `exclusive`, it looks only at the first step
            after it was idle, and after `swap_weights`. If a weight was replaced, running sequences are computed again from their first
            token, and the prefix cache is cleared.
        say: called with the name of the program that is being compiled, if compiling takes longer than a second.
        exclusive: whether nothing else uses the model. Then its weights stay prepared while the engine is idle. It must be false for a
            model that is being trained: views of its weights would make a training step copy arrays that it should reuse.
        draft: the module of the draft model, if the settings ask for one.
        adapters: adapters shared with another engine over this model (`Adapters.for_engine`). None: the engine makes its own, if the
            settings enable adapters.
        copies: number of engines like this one in the process. On a CPU they share the memory.
        origin: the quantized blocks of the GGUF file that weights were read from, which take fewer bytes when packed for the CPU.

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
        exclusive: bool = False,
        draft: Any = None,
        adapters: Adapters | None = None,
        copies: int = 1,
        origin: Origin | None = None,
    ):
        self.settings = settings = settings or EngineSettings()
        self.adapters = adapters or (Adapters(settings.lora, model, settings.slots) if settings.lora.enabled else None)
        options: Any = {"say": say, "exclusive": exclusive, "draft": draft, "copies": copies, "origin": origin}
        self.runner = Runner(model, settings, adapters=self.adapters, **options)
        self.stats, self.vocab, self.context = self.runner.stats, self.runner.vocab, self.runner.context
        self.speculation, shares = self.runner.speculation, self.runner.shares
        size, windows = self.runner.cache_size, self.runner.needs.windows
        reuse = settings.reuse and shares
        self.pages = PagePool(size.pages, reuse=reuse)
        self.scheduler = Scheduler(
            self.pages,
            settings.page,
            settings.slots,
            settings.budget,
            settings.budget_decoding,
            ROW if shares else 1,
            None if shares else 1,
            [WindowPool(window, PagePool(n, reuse=reuse), windows[window].filling) for window, n in size.windows.items()],
            copies=shares and self.speculation is None,
        )
        self._requests: dict[int, RequestState] = {}
        self._next_id = 0
        self._in_flight: list[tuple[StepBatch, SamplerOutput | VerifiedTokens]] = []
        self._events: list[Event] = []
        self._uncollected: dict[int, list[Event]] = {}

    @property
    def say(self) -> Say | None:
        return self.runner.say

    @say.setter
    def say(self, say: Say | None) -> None:
        self.runner.say = say

    # ---------------------------------------------------------------- requests come and go

    def add(self, request: Request) -> int:
        """Queues a request. Returns its id, which its events carry. A completion is never longer than the context allows.

        Raises:
            BadInput: an empty prompt, ids outside the vocabulary, a prompt that fills the context, a seed of more than 64 bits, more
                than 20 likeliest tokens, no token that is allowed, a grammar over another vocabulary, an adapter that is not loaded,
                embeddings or positions that do not fit the prompt or the model.
        """
        request.check(self.vocab, self.context)
        self.runner.check_inputs(request)
        adapter = None if request.adapter is None else self._adapters().get(request.adapter)
        random_key = self.runner.random_key(request.seed, request.row)
        sizes: Any = {"vocab": self.vocab, "context": self.context}
        state = new_state(request, self._next_id, self.page_key(request), random_key, adapter, **sizes)
        self._next_id += 1
        if self.adapters is not None:
            self.adapters.use(adapter)
        self._requests[state.id] = state
        self.scheduler.add(state.scheduled)
        return state.id

    def page_key(self, request: Request) -> PageKey:
        """The prefix-cache key of a request: what the content of its pages depends on besides token ids. Any thread may call it."""
        digests = () if request.inputs is None else request.inputs.digests(self.settings.page)
        if self.adapters is None:
            return PageKey(request.salt, digests)
        loaded = None if request.adapter is None else self.adapters.loaded.get(request.adapter)
        return PageKey(self.adapters.salt(loaded, request.salt), digests)

    def abort(self, id: int) -> bool:
        """Ends a request with an `abort` event and frees its pages. Returns False if it has ended already."""
        ended = self.end(id)
        if ended:
            self._events.append(Event(id, None, 0.0, "abort"))
        return ended

    def end(self, id: int) -> bool:
        """Ends a request without any further event, and frees its pages. Returns False if it has ended already."""
        self._uncollected.pop(id, None)
        state = self._requests.get(id)
        if state is not None:
            self._remove(state)
        return state is not None

    def _close(self, state: RequestState, reason: FinishReason) -> None:
        """Ends a completion without a token."""
        self._events.append(Event(state.id, None, 0.0, reason, reused=state.scheduled.reused))
        self._remove(state)

    def _remove(self, state: RequestState) -> None:
        present = self._requests.pop(state.id, None) is not None
        self.scheduler.end(state.scheduled)
        if self.adapters is not None and present:
            self.adapters.leave(state.adapter)

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or events have not been returned yet."""
        return bool(self._requests or self._events or self._in_flight)

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or runs. Even if none does, a step may be in flight, for requests that were ended meanwhile."""
        return bool(self._requests)

    # ---------------------------------------------------------------- a step

    def step(self) -> list[Event]:
        """Starts the next step, and returns the events of the previous one. With speculation it returns the events of the step
        itself."""
        self.runner.refresh_weights(self._restart)
        try:
            plan = self.scheduler.plan(self.speculation and self.speculation.room, self._steps())
            if plan:
                self._in_flight.append(self._dispatch(plan))
            if self._in_flight and (len(self._in_flight) > 1 or not plan or self.speculation):
                self._land(*self._in_flight.pop(0))
        except BaseException:
            # The prefix cache finds pages as soon as a step is planned that will compute them, and this step may have failed to.
            self.scheduler.clear_prefix_cache()
            raise
        events, self._events = self._events, []
        if not self.busy:
            self.runner.rest()
        return events

    def _steps(self) -> int:
        """The number of decode steps per dispatch; 1 if the host must see each token of a running request."""
        if self.settings.steps > 1 and any(request.stepwise for request in self.scheduler.running):
            return 1
        return self.settings.steps

    def _dispatch(self, plan: StepPlan) -> tuple[StepBatch, SamplerOutput | VerifiedTokens]:
        """Starts a step. Before, it writes the rows of the sampler's state for requests that got a slot in this step."""
        begun = [(chunk.request, chunk.start) for chunk in plan.chunks]
        begun += [(request, len(request.tokens) - 1) for request in plan.decodes if request.copied]
        for request, start in begun:
            if (state := self._requests[request.id]).needs_slot:
                self.runner.write_slot(state)
                self.stats.reused_tokens += start
                self.stats.prompt_tokens += request.copied
        self.stats.prompt_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
        return self.runner.dispatch(plan, self._constrain)

    def _constrain(self, batch: StepBatch) -> None:
        """Writes the changed masks of the requests that are sampled in this step, after reading the tokens of earlier steps."""
        if not any(request.stepwise for request in batch.due):
            return
        self._land_all()
        due = [self._requests[request.id] for request in batch.due if request.stepwise and not request.done]
        self.runner.write_masks(mask_rows(due, self.vocab, self._close))

    def _land_all(self) -> None:
        while self._in_flight:
            self._land(*self._in_flight.pop(0))

    def _land(self, batch: StepBatch, out: SamplerOutput | VerifiedTokens) -> None:
        """Reads the tokens that a step sampled, waiting for the device, and adds them to their completions."""
        places: list[tuple[ScheduledRequest, Any]] = [(request, i) for i, request in enumerate(batch.due)]
        if batch.counts:
            places = [(request, (at, i)) for request, i in places for at in range(batch.counts[i])]
        if isinstance(out, VerifiedTokens):
            assert self.speculation is not None
            places, out = self.speculation.landed(self.scheduler, batch, out), out.sampled
        tokens, logprobs, drawn = (np.asarray(a) for a in out[:3])
        for request, at in places:
            if request.done:
                continue
            state, top = self._requests[request.id], ()
            if count := state.request.top:
                top = tuple(zip(np.asarray(out.ids[at])[:count].tolist(), np.asarray(out.likeliest[at])[:count].tolist()))
            self._append(state, int(tokens[at]), float(logprobs[at]), float(drawn[at]), top)

    def _append(self, state: RequestState, token: int, logprob: float, drawn: float, top: Any) -> None:
        """Adds a token to a completion, and ends the completion if this is its last token."""
        request, scheduled = state.request, state.scheduled
        self.scheduler.append_token(scheduled, token)
        self.stats.drawn_tokens += 1
        reason: FinishReason | None = None
        complete = False
        if token in request.stop_tokens:
            reason = "stop"
        elif state.matcher is not None and state.matcher.push(token):
            complete = True
        elif len(scheduled.tokens) - scheduled.prompt == scheduled.max_tokens:
            reason = "length"
        elif request.repetition is not None and request.repetition(scheduled.completion):
            reason = "repetition"
        self._events.append(Event(state.id, token, logprob, reason, drawn, top, scheduled.reused))
        if complete:
            self._close(state, "stop")
        elif reason is not None:
            self._remove(state)

    # ---------------------------------------------------------------- until requests have ended

    def run(self) -> Iterator[Event]:
        """Runs steps until every request has ended, and yields their events."""
        while self.busy:
            yield from self.step()

    def collect(self, ids: Collection[int]) -> list[Event]:
        """Runs steps until one of these requests has an event, and returns the new events of all of these. Events of other requests are
        kept until a call with their ids, so several callers may share an engine."""
        while not (events := [event for id in ids for event in self._uncollected.pop(id, ())]):
            if not self.busy:
                raise RuntimeError(f"requests {sorted(ids)} have ended")
            for event in self.step():
                self._uncollected.setdefault(event.id, []).append(event)
        return events

    def generate(self, requests: Sequence[Request]) -> list[list[Event]]:
        """Runs these requests to their end. Returns the events of each, in the order of the requests.

        Raises:
            BadInput: as `add`. Then none of the requests stays queued.
        """
        events: dict[int, list[Event]] = {}
        try:
            for request in requests:
                events[self.add(request)] = []
            open_ = set(events)
            while open_:
                for event in self.collect(open_):
                    events[event.id].append(event)
                    open_ -= {event.id} if event.finish_reason else set()
        finally:
            for id in events:
                self.end(id)
        return list(events.values())

    # ---------------------------------------------------------------- weights and memory

    @property
    def model(self) -> Any:
        return self.runner.model

    def weights(self) -> Leaves:
        """The current weights, by parameter name."""
        return self.runner.weights()

    def swap_weights(self, weights: Mapping[str, Any]) -> None:
        """Replaces weights, by parameter name, in the model. Running completions go on with the new weights from their next token.

        Raises:
            KeyError: the model has no parameter of this name.
            ValueError: a weight has another shape.
        """
        self.runner.swap_weights(weights)

    def _restart(self) -> None:
        self._land_all()
        self.scheduler.restart_all()

    def reset_prefix_cache(self, *, running: bool = False) -> bool:
        """Clears the prefix cache. Returns whether it did.

        Args:
            running: whether to clear it while sequences run, which are then computed again from their first token. If false, nothing is
                done while sequences run.
        """
        if running:
            self._restart()
        elif not self.scheduler.is_empty:
            return False
        self.scheduler.clear_prefix_cache()
        return True

    def sleep(self) -> bool:
        """Frees the memory of the KV cache until the next step. Compiled programs are kept. Returns whether it did: while sequences
        run, and with speculation, it does nothing."""
        if self.speculation is not None or not self.reset_prefix_cache():
            return False
        self._land_all()
        self.runner.free_caches()
        return True

    def warm_up(self, store: ProgramStore | None = None) -> int:
        """Compiles every program that a step may need, or loads it from a store. Returns how many were compiled. Later requests compile
        nothing. One step with one token is computed.

        Args:
            store: compiled programs of earlier starts. Programs that it lacks are added to it.

        Raises:
            RuntimeError: requests are running.
        """
        if self.busy:
            raise RuntimeError("warm_up is for an engine without requests")
        self.runner.refresh_weights(self._restart)
        return self.runner.warm_up(store, copies=self.scheduler.copies)

    # ---------------------------------------------------------------- adapters

    def load_adapter(self, name: str, folder: str | Path, *, replace: bool = False) -> None:
        """Loads a PEFT folder as an adapter that requests may name. Running completions go on with the adapter that they began with.

        Args:
            name: the name that requests use.
            replace: whether a loaded adapter of this name may be replaced.

        Raises:
            BadInput: the adapter does not fit the model or `settings.lora`, the name is taken, or as many adapters are loaded as may
                be. Nothing is changed then.
            Unsupported: it has more than low-rank factors (DoRA, biases).
        """
        adapters = self._adapters()
        adapters.put(name, adapters.read(folder), replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter: its running and waiting requests finish with it, and new ones are refused.

        Raises:
            UnknownAdapter: no adapter of this name is loaded.
        """
        self._adapters().unload(name)

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """The sorted names of the adapters of running requests, and those of waiting requests. Any thread may call it."""
        names: tuple[set[str], set[str]] = set(), set()
        for state in list(self._requests.values()):
            if state.request.adapter is not None:
                names[state.scheduled.slot < 0].add(state.request.adapter)
        return sorted(names[0]), sorted(names[1])

    def _adapters(self) -> Adapters:
        if self.adapters is None:
            raise UnknownAdapter("this engine takes no adapters", hint="engine.lora.enabled=true")
        return self.adapters
