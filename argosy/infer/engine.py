"""The engine: continuous batching of many requests through one model, each with its own sampling settings.

    engine = Engine(model)
    engine.add(Request(ids, most=64, sampling=Sampling(temperature=0.7), seed=1))
    while engine.busy:
        for event in engine.step():
            ...

A step is one forward pass over the new tokens of all sequences, decoding and prefilling together (`parts.ragged`), then one call of
the sampler. Sampled tokens stay on the device for the next step. The host plans a step while the device computes the previous one
(`infer.schedule`), so the end of a sequence is seen one step late, and the token that step samples for it is dropped.

Sampling settings are arrays on the device with a row per slot, so a request with other settings compiles nothing. The forward pass
is compiled for a number of decoding rows and a number of prompt rows, both rounded up to powers of four.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from pydantic import Field

from argosy.core.errors import BadInput
from argosy.core.progress import Say, telling
from argosy.core.settings import Settings
from argosy.infer.pages import Pages
from argosy.infer.sample import Sampling, Seed, drawn, penalized, streams, table
from argosy.infer.schedule import Plan, Scheduler, Sequence
from argosy.models.parts.attend import Paged
from argosy.models.parts.cache import Caches, Specs, bytes_of, paged
from argosy.models.parts.ragged import Ragged, rows_share_pages
from argosy.models.parts.weight import Leaves, merge, split, variable

Reason = Literal["stop", "length", "abort"]

# Tokens per row of a prompt, if several rows may belong to one sequence.
ROW = 32


class EngineSettings(Settings):
    """Settings of the engine: memory, and how prefill and decoding share a step."""

    slots: int = Field(32, gt=0)
    """Number of sequences that run at a time; others wait."""
    page: int = Field(16, gt=0)
    """Tokens per page of the cache."""
    pages: int | None = Field(None, gt=0)
    """Number of pages of the cache. By default enough for `slots` sequences of `context` tokens, but at most 4 GB, or what one
    sequence needs if that is more."""
    context: int | None = Field(None, gt=0)
    """Longest sequence in tokens, prompt and answer; by default the model's context."""
    budget: int = Field(512, ge=ROW)
    """Prompt tokens per step, if no sequence decodes."""
    beside: int = Field(128, ge=ROW)
    """Prompt tokens per step, if sequences decode too. A lower value shortens the time between tokens, a higher one the time to
    the first token."""
    reuse: bool = True
    """Prefix caching: the common beginning of prompts is computed once. Off for models with recurrent layers, whose states are not
    kept."""


@dataclass
class Request:
    """One prompt, and how to answer it.

    tokens: prompt ids. most: limit on the tokens of the answer. ends: ids that end the answer. seed, row: folded into one random
    stream, as in `infer.sample.streams`. priority: lower runs first. salt: prompts share cached pages only under the same salt.
    """

    tokens: list[int]
    most: int
    sampling: Sampling = field(default_factory=Sampling)
    ends: frozenset[int] = frozenset()
    seed: Seed = 0
    row: int = 0
    priority: int = 0
    salt: str = ""


class Event(NamedTuple):
    """A new token of a request, its end, or both.

    token: None if the request was aborted. logprob: the model's own, before temperature, filters and penalties. reason: why the
    answer ended; None if it has not. The token that ended it by `stop` is the event's token.
    """

    id: int
    token: int | None
    logprob: float
    reason: Reason | None


class Slots(NamedTuple):
    """The sampler's state on the device; every array has a row per slot.

    last: the token sampled last. made: number of tokens sampled. keys: data of the random key [slots 2]. settings: from
    `infer.sample.table`. seen: tokens in prompt or answer [slots V]. counts: occurrences in the answer [slots V].
    """

    last: Array
    made: Array
    keys: Array
    settings: dict[str, Array]
    seen: Array
    counts: Array


class Sizes(NamedTuple):
    """The sizes that a forward pass is compiled for: decoding rows, prompt rows, tokens per prompt row, pages per sequence."""

    decodes: int
    rows: int
    width: int
    pages: int

    @property
    def words(self) -> int:
        """Length of the array that describes a step."""
        return self.decodes * (2 + self.pages) + self.rows * (4 + self.pages + self.width)


@dataclass
class Stats:
    """Counts since the engine was made."""

    steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    drawn_tokens: int = 0
    compilations: int = 0
    compile_seconds: float = 0.0


class Engine:
    """Answers many requests with one model at a time.

    Args:
        model: a decoder module. Its weights are read at each step. If one was replaced, running sequences are computed again from
            their first token, and the prefix cache is cleared.
        say: called with what is being compiled, if that takes longer than a second.

    Raises:
        BadInput: the cache has no room for one sequence of `context` tokens.
    """

    def __init__(self, model: Any, settings: EngineSettings | None = None, *, say: Say | None = None):
        self.model, self.settings, self.say = model, settings or EngineSettings(), say
        self.graph, weights = split(model)
        self.variables = {address: variable(model, address) for address in weights}
        self._weights = self.weights()
        self.dtype, self.vocab = model.dtype, model.config.vocab
        self.context = min(self.settings.context or model.config.context, model.config.context)
        self.specs: Specs = model.layers.holds()
        page, slots = self.settings.page, self.settings.slots
        self.table_pages = -(-self.context // page)
        self.shares = rows_share_pages(self.specs, self.context, slack=self.context)
        reuse = self.settings.reuse and self.shares
        self.pages = Pages(self.settings.pages or self._default_pages(), reuse=reuse)
        if self.pages.count < self.table_pages:
            raise BadInput(
                f"a cache of {self.pages.count} pages of {page} tokens holds no sequence of {self.context}",
                hint="more pages, or a shorter context",
            )
        self.row = ROW if self.shares else 1
        self.scheduler = Scheduler(
            self.pages, page, slots, self.settings.budget, self.settings.beside, self.row, None if self.shares else 1
        )
        self.caches, self.slots = self._fresh(slots)
        self.stats = Stats()
        self._sequences: dict[int, Sequence] = {}
        self._next = 0
        self._flying: list[tuple[list[Sequence | None], Any]] = []
        self._events: list[Event] = []
        self._sizes: set[tuple[int, ...]] = set()

    def _default_pages(self) -> int:
        page, slots = self.settings.page, self.settings.slots
        one = bytes_of(jax.eval_shape(lambda: paged(self.specs, 0, 1, page, self.dtype, longest=1, slack=self.context)))
        most = max(self.table_pages, int(4e9 // max(one, 1)))
        return min(slots * self.table_pages, most)

    def _fresh(self, slots: int) -> tuple[Caches, Slots]:
        page = self.settings.page
        caches = paged(
            self.specs, slots, self.pages.count, page, self.dtype, longest=self.context, slack=self.context
        )
        plain = {name: jnp.asarray(column) for name, column in table([Sampling()] * slots).items()}
        V = self.vocab
        return caches, Slots(
            jnp.zeros(slots, jnp.int32),
            jnp.zeros(slots, jnp.int32),
            jnp.zeros((slots, 2), jnp.uint32),
            plain,
            jnp.zeros((slots, V), bool),
            jnp.zeros((slots, V), jnp.int32),
        )

    def weights(self) -> Leaves:
        """The current weights."""
        return {address: v.get_value() for address, v in self.variables.items()}

    # ---------------------------------------------------------------- requests

    def add(self, request: Request) -> int:
        """Queues a request; returns its number, which its events carry. An answer is never longer than the context allows.

        Raises:
            BadInput: an empty prompt, ids outside the vocabulary, a prompt that fills the context, a seed of more than 64 bits.
        """
        ids = request.tokens
        if not ids:
            raise BadInput("an empty prompt")
        if min(ids) < 0 or max(ids) >= self.vocab:
            wrong = next(i for i in ids if not 0 <= i < self.vocab)
            raise BadInput(f"token id {wrong} is outside the model's vocabulary of {self.vocab}")
        if len(ids) >= self.context:
            raise BadInput(
                f"a prompt of {len(ids)} tokens leaves no room in a context of {self.context}", hint="shorten it"
            )
        if request.most < 1:
            raise BadInput(f"most = {request.most} tokens", hint="at least 1")
        most = min(request.most, self.context - len(ids))
        sequence = Sequence(list(ids), most, priority=request.priority, salt=request.salt)
        number, self._next = self._next, self._next + 1
        sequence.what = _Wanted(number, request, np.asarray(jax.random.key_data(streams(request.seed, [request.row])))[0])
        self._sequences[number] = sequence
        self.scheduler.add(sequence)
        return number

    def abort(self, number: int) -> bool:
        """Ends a request; the next step may use its pages. Returns False if it has ended already."""
        sequence = self._sequences.pop(number, None)
        if sequence is None:
            return False
        self.scheduler.end(sequence)
        self._events.append(Event(number, None, 0.0, "abort"))
        return True

    def _look_for_new_weights(self) -> None:
        """Computes running sequences again and clears the prefix cache, if a weight was replaced since the last step."""
        now = self.weights()
        if all(now[address] is old for address, old in self._weights.items()):
            return
        self._weights = now
        while self._flying:
            self._land(*self._flying.pop(0))
        self.scheduler.begin_anew()

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or events have not been returned yet."""
        return bool(self._sequences or self._events or self._flying)

    # ---------------------------------------------------------------- a step

    def step(self) -> list[Event]:
        """Starts the next step, and returns the events of the previous one."""
        self._look_for_new_weights()
        plan = self.scheduler.plan()
        if plan:
            self._flying.append(self._dispatch(plan))
        if self._flying and (len(self._flying) > 1 or not plan):
            self._land(*self._flying.pop(0))
        events, self._events = self._events, []
        return events

    def run(self) -> Iterator[Event]:
        """Steps until every request has ended."""
        while self.busy:
            yield from self.step()

    def _land(self, due: list[Sequence | None], drawn: Any) -> None:
        """Reads what a step sampled."""
        tokens, logprobs = (np.asarray(a) for a in drawn)
        for sequence, token, logprob in zip(due, tokens.tolist(), logprobs.tolist()):
            if sequence is None or sequence.done:
                continue
            self._learn(sequence, token, logprob)

    def _learn(self, sequence: Sequence, token: int, logprob: float) -> None:
        wanted: _Wanted = sequence.what
        self.scheduler.learned(sequence, token)
        self.stats.drawn_tokens += 1
        answer = len(sequence.tokens) - sequence.prompt
        reason: Reason | None = None
        if token in wanted.request.ends:
            reason = "stop"
        elif answer == sequence.most:
            reason = "length"
        self._events.append(Event(wanted.number, token, logprob, reason))
        if reason is not None:
            self.scheduler.end(sequence)
            self._sequences.pop(wanted.number, None)

    # ---------------------------------------------------------------- dispatch

    def _dispatch(self, plan: Plan) -> tuple[list[Sequence | None], Any]:
        for piece in plan.pieces:
            if piece.sequence.what.slot != (piece.sequence.slot, piece.sequence.preemptions):
                self._settle(piece.sequence)
                self.stats.reused_tokens += piece.start
            self.stats.prompt_tokens += len(piece.tokens)
        sizes, words, due = self._packed(plan)
        what = f"a step of {sizes.decodes} decoding rows and {sizes.rows} x {sizes.width} prompt tokens"
        logits, where, self.caches = self._run(
            what, _forward(self.graph, self.dtype), sizes, self._weights, self.caches, self.slots.last, words, sizes
        )
        self.slots, drawn = self._run(f"the sampler for {len(logits)} rows", _draw, logits.shape, self.slots, logits, where)
        for a in drawn:
            a.copy_to_host_async()
        self.stats.steps += 1
        return due, drawn

    def _run(self, what: str, program: Any, sizes: tuple[int, ...], *arguments: Any) -> Any:
        """Calls a program; counts and times the call if it compiles."""
        if sizes in self._sizes:
            return program(*arguments)
        start = time.monotonic()
        with telling(self.say, f"compiling {what}"):
            out = program(*arguments)
        self._sizes.add(sizes)
        self.stats.compilations += 1
        self.stats.compile_seconds += time.monotonic() - start
        return out

    def _settle(self, sequence: Sequence) -> None:
        """Writes the settings and the tokens of a sequence into the sampler's rows of its slot."""
        wanted: _Wanted = sequence.what
        row = {name: column[0] for name, column in table([wanted.request.sampling]).items()}
        seen, counts = np.zeros(self.vocab, bool), np.zeros(self.vocab, np.int32)
        seen[sequence.tokens] = True
        np.add.at(counts, sequence.tokens[sequence.prompt :], 1)
        made = len(sequence.tokens) - sequence.prompt
        self.slots = _settled(self.slots, np.int32(sequence.slot), row, wanted.key, np.int32(made), seen, counts)
        wanted.slot = (sequence.slot, sequence.preemptions)

    def _packed(self, plan: Plan) -> tuple[Sizes, np.ndarray, list[Sequence | None]]:
        """A plan as one array, for one transfer to the device; and for each row the sequence it samples for, or None."""
        P = self.table_pages
        decodes = _power(len(plan.decodes), 4)
        if self.shares:
            width = ROW
            rows = [
                (piece, at) for piece in plan.pieces for at in range(0, len(piece.tokens), width)
            ]
        else:
            longest = max((len(piece.tokens) for piece in plan.pieces), default=0)
            width, rows = ROW * _power(-(-longest // ROW), 4), [(piece, 0) for piece in plan.pieces]
        sizes = Sizes(decodes, _power(len(rows), 4), width if rows else 0, P)
        words = np.zeros(sizes.words, np.int32)
        due: list[Sequence | None] = [None] * (sizes.decodes + sizes.rows)
        d, c = _cut(words, sizes)
        d["slot"][:], d["table"][:], c["slot"][:], c["table"][:] = -1, -1, -1, -1
        for i, sequence in enumerate(plan.decodes):
            d["slot"][i], d["length"][i] = sequence.slot, sequence.computed - 1
            d["table"][i, : len(sequence.pages)] = sequence.pages
            due[i] = sequence
        for i, (piece, at) in enumerate(rows):
            tokens, sequence = piece.tokens[at : at + width], piece.sequence
            c["slot"][i], c["length"][i], c["new"][i] = sequence.slot, piece.start + at, len(tokens)
            c["table"][i, : len(sequence.pages)] = sequence.pages
            c["tokens"][i, : len(tokens)] = tokens
            if piece.ends and at + width >= len(piece.tokens):
                c["ends"][i] = 1
                due[sizes.decodes + i] = sequence
        return sizes, words, due


@dataclass(eq=False)
class _Wanted:
    """The engine's data of a sequence. slot: the slot, and the number of preemptions, when the sampler's rows were last written."""

    number: int
    request: Request
    key: np.ndarray
    slot: tuple[int, int] | None = None


def _power(n: int, base: int) -> int:
    """The next larger power of the base; 0 for 0."""
    size = min(n, 1)
    while size < n:
        size *= base
    return size


def _cut(words: Any, sizes: Sizes) -> tuple[dict[str, Any], dict[str, Any]]:
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
    rows = {"slot": take(Q), "length": take(Q), "new": take(Q), "ends": take(Q), "table": take(Q, P), "tokens": take(Q, T)}
    return decodes, rows


# ---------------------------------------------------------------- programs


@partial(jax.jit, donate_argnums=0)
def _settled(
    slots: Slots, slot: Array, row: dict[str, Array], key: Array, made: Array, seen: Array, counts: Array
) -> Slots:
    """Sets the rows of one slot."""
    return slots._replace(
        made=slots.made.at[slot].set(made),
        keys=slots.keys.at[slot].set(key),
        settings={name: column.at[slot].set(row[name]) for name, column in slots.settings.items()},
        seen=slots.seen.at[slot].set(seen),
        counts=slots.counts.at[slot].set(counts),
    )


@lru_cache(maxsize=16)
def _forward(graph: Any, dtype: Any) -> Any:
    """(weights, caches, last token of each slot, words, Sizes) -> (logits [rows V], slot of each row, caches).

    Decoding rows come first, then prompt rows. A row that samples nothing has slot -1.
    """

    def forward(
        weights: Leaves, caches: Caches, last: Array, words: Array, sizes: Sizes
    ) -> tuple[Array, Array, Caches]:
        model = merge(graph, weights)
        model.dtype = dtype
        d, c = _cut(words, sizes)
        groups, flat, due, ends = [], [], [], []
        if sizes.decodes:
            live = (d["slot"] >= 0).astype(jnp.int32)
            groups.append(Paged(d["table"], d["slot"], d["length"], live, _counting(sizes.decodes, 1)))
            flat.append(jnp.take(last, d["slot"], mode="clip"))
            due.append(d["slot"])
            ends.append(jnp.arange(sizes.decodes, dtype=jnp.int32))
        if sizes.rows:
            groups.append(Paged(c["table"], c["slot"], c["length"], c["new"], _counting(sizes.rows, sizes.width)))
            flat.append(c["tokens"].reshape(-1))
            due.append(jnp.where(c["ends"] > 0, c["slot"], -1))
            first = sizes.decodes + sizes.width * jnp.arange(sizes.rows, dtype=jnp.int32)
            ends.append(first + jnp.maximum(c["new"] - 1, 0))
        x, caches, _ = model.hidden(jnp.concatenate(flat)[None], Ragged(tuple(groups)), caches)
        rows, slots = jnp.concatenate(ends), jnp.concatenate(due)
        return model.unembed(x[:, rows])[0], slots, caches

    return jax.jit(forward, donate_argnums=1, static_argnums=4)


def _counting(rows: int, width: int) -> Array:
    return jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))


@partial(jax.jit, donate_argnums=0)
def _draw(state: Slots, logits: Array, slots: Array) -> tuple[Slots, tuple[Array, Array]]:
    """(Slots, logits [rows V], slot of each row or -1) -> (Slots, (tokens [rows], their log-probabilities [rows]))."""
    n = state.last.shape[0]
    where = jnp.where(slots >= 0, slots, n)
    mine = jnp.clip(slots, 0, n - 1)
    settings = {name: column[mine] for name, column in state.settings.items()}
    live = slots >= 0
    settings["temperature"] = jnp.where(live, settings["temperature"], 0.0)
    penal = live & (
        (settings["repetition_penalty"] != 1) | (settings["presence_penalty"] != 0) | (settings["frequency_penalty"] != 0)
    )
    scored = jax.lax.cond(
        penal.any(), lambda: penalized(logits, settings, state.seen[mine], state.counts[mine]), lambda: logits
    )
    greedy = jnp.argmax(scored, -1).astype(jnp.int32)

    def by_chance() -> Array:
        keys = jax.random.wrap_key_data(state.keys[mine])
        keys = jax.vmap(jax.random.fold_in)(keys, state.made[mine])
        warm = scored / jnp.maximum(settings["temperature"], 1e-6)[:, None]
        return jnp.where(settings["temperature"] > 0, drawn(warm, settings, keys), greedy)

    tokens = jax.lax.cond((settings["temperature"] > 0).any(), by_chance, lambda: greedy)
    own = jnp.take_along_axis(logits, tokens[:, None], -1)[:, 0]
    logprobs = own - jax.nn.logsumexp(logits, -1)
    state = state._replace(
        last=state.last.at[where].set(tokens, mode="drop"),
        made=state.made.at[where].add(1, mode="drop"),
        seen=state.seen.at[where, tokens].set(True, mode="drop"),
        counts=state.counts.at[where, tokens].add(1, mode="drop"),
    )
    return state, (tokens, logprobs)
