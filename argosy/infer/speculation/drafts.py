"""Who proposes drafts, and the simplest who does: n-grams.

    NGramDrafter    what followed the last tokens where they occurred before; on the host, no model
    ModelDrafter    a second model (`infer.speculation.draft_model`)
    MTPDrafter      the model's module for multi-token prediction (`infer.speculation.mtp`)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from argosy.core.counts import plural
from argosy.infer import settings
from argosy.infer.engine.batch import BatchBuilder, StepBatch, sampler_rows
from argosy.infer.engine.cache import CacheNeeds, CacheSize, reserve_caches
from argosy.infer.engine.scheduled import ScheduledRequest
from argosy.infer.engine.scheduler import StepPlan
from argosy.infer.forward.step import StepSizes, empty_words, split_words
from argosy.infer.placement import Home, home_mesh
from argosy.infer.sampling.sampler import SamplerFeatures, Slots, sample
from argosy.models.parts.attention.cache import Caches, Specs
from argosy.ops.programs.programs import Program, Programs


class DraftContext(NamedTuple):
    """The parts of an engine that a drafter uses.

    batches: fills the arrays of steps.
    max_length: longest sequence in tokens.
    home: where the state of programs lies.
    run: `Runner.run`, which counts compilations.
    programs: the engine's.
    """

    batches: BatchBuilder
    max_length: int
    home: Home
    run: Callable[..., Any]
    programs: Programs

    def page_bytes(self, specs: Specs, dtype: Any) -> int:
        """Bytes of further caches for each page of the engine's."""
        return self._needs(specs, dtype).bytes(home_mesh(self.home), CacheSize(1, {}))

    def allocated(self, specs: Specs, pages: int, dtype: Any) -> Caches:
        """Further caches with as many pages. All their layers keep all tokens."""
        needs, slots = self._needs(specs, dtype), self.batches.settings.slots
        return reserve_caches(specs, self.home, lambda: needs.empty(slots, CacheSize(pages, {})))

    def _needs(self, specs: Specs, dtype: Any) -> CacheNeeds:
        settings = self.batches.settings
        return CacheNeeds(specs, settings.page, dtype, self.max_length, {}, settings.cache_dtype)


class Drafter:
    """Proposes the next tokens of sequences. A wrong draft costs time and nothing else.

    tokens: largest number of drafts per sequence and step.
    page_bytes: size of its own caches, for each page of the engine's.
    caches: its own caches.
    """

    tokens: int
    page_bytes: int = 0
    caches: Caches | None = None

    def allocate(self, pages: int) -> None:
        """Allocates its own caches."""

    def draft(self, plan: StepPlan, slots: Slots) -> list[list[int]]:
        """The drafts of each decoding sequence of a plan, at most as many as `plan.draft_room` says. The plan's prompts are computed
        after this, so a drafter with caches of its own computes them here too.

        Args:
            slots: the sampler's state, for drafters that sample; not changed.
        """
        raise NotImplementedError

    def observe(self, step: StepBatch, hidden: Any) -> None:
        """Takes the input of the model's head at the tokens of the step that was drafted last."""

    def warm_up(self, slots: Slots) -> None:
        """Compiles what `draft` may need."""


class NGramDrafter(Drafter):
    """Prompt lookup (Saxena 2023): the tokens after the latest place where the last tokens of the sequence occurred before.

    The place that agrees with the most tokens is taken. Where the text after it runs into the end of the sequence, the drafts
    continue with themselves, so that a text with a short period is drafted to any length.
    """

    def __init__(self, ngram: settings.NGram):
        self.tokens, self.least, self.most = ngram.tokens, ngram.lookup_min, ngram.lookup_max
        self._known: WeakKeyDictionary[ScheduledRequest, _Ids] = WeakKeyDictionary()

    def draft(self, plan: StepPlan, slots: Slots) -> list[list[int]]:
        return [self._draft(sequence, room) for sequence, room in zip(plan.decodes, plan.draft_room, strict=True)]

    def _draft(self, sequence: ScheduledRequest, room: int) -> list[int]:
        if not room:
            return []
        ids = self._known.setdefault(sequence, _Ids()).grown(sequence.tokens)
        start = last_occurrence(ids, self.least, self.most)
        if start is None:
            return []
        following = ids[start : start + room].tolist()
        return (following * -(-room // len(following)))[:room]


class _Ids:
    """The tokens of a sequence as an array, which takes the new ones only."""

    def __init__(self) -> None:
        self._ids, self._count = np.zeros(256, np.int32), 0

    def grown(self, tokens: Sequence[int]) -> Int[np.ndarray, " T"]:
        if len(tokens) > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._count], np.zeros(2 * len(tokens) - self._count, np.int32)])
        self._ids[self._count : len(tokens)] = tokens[self._count :]
        self._count = len(tokens)
        return self._ids[: self._count]


def last_occurrence(ids: Int[np.ndarray, " T"], least: int, most: int) -> int | None:
    """The place after the latest earlier occurrence of as many of the last tokens as possible, `least` to `most`; None if there is
    none. Comparing 8,000 tokens takes 10 microseconds."""
    count = len(ids)
    ends, place = np.flatnonzero(ids[:-1] == ids[-1]), None
    for length in range(1, min(most, count - 1) + 1):
        ends = ends[ends >= length - 1]
        ends = ends[ids[ends - length + 1] == ids[count - length]]
        if not len(ends):
            break
        if length >= least:
            place = int(ends[-1]) + 1
    return place


# ---------------------------------------------------------------- for drafters that are models


def sampled_drafts(
    plan: StepPlan,
    room: Sequence[int],
    logits: Float[Array, "B V"],
    slots: Slots,
    passed: Callable[[int, list[bool], Slots], Float[Array, "B V"]],
    run: Callable[..., Any],
) -> list[list[int]]:
    """Drafts sampled one after the other, with the settings, penalties and random keys of the tokens that they guess.

    Args:
        room: number of drafts to sample for each decoding sequence of the plan.
        logits: of the first draft.
        passed: (index of the draft, which sequences have another one, the sampler's state) -> its logits, after a pass over the
            previous draft, the state's `last`.
        run: `Runner.run`.
    """
    state, columns = copied_slots(slots, run), []
    for at in range(max(room)):
        live = [count > at for count in room]
        logits = passed(at, live, state) if at else logits
        owners = np.full(len(logits), -1, np.int32)
        owners[: len(live)] = [s.slot if on else -1 for s, on in zip(plan.decodes, live, strict=True)]
        label = f"the sampler for {plural(len(owners), 'row')}"
        state, out = run(label, sample, (len(owners), SamplerFeatures.ALL), state, logits, owners, SamplerFeatures.ALL)
        columns.append(out.tokens)
    tokens = np.stack(jax.device_get([column[: len(room)] for column in columns]), 1).tolist()
    return [row[:most] for row, most in zip(tokens, room, strict=True)]


def decoding_rows(batches: BatchBuilder, plan: StepPlan, live: Sequence[bool], before: Sequence[int]) -> tuple[StepSizes, np.ndarray]:
    """A pass of one token for each live sequence, after so many."""
    sizes = batches.decode_sizes(len(live))
    words = empty_words(sizes)
    d, _, _ = split_words(words, sizes)
    for i, (sequence, on) in enumerate(zip(plan.decodes, live, strict=True)):
        if on:
            d["slot"][i], d["length"][i] = sequence.slot, before[i]
            batches.write_pages(d, i, sequence)
    return sizes, words


def first_rows(count: int) -> np.ndarray:
    """The places of this many rows, as long as the sampler is compiled for."""
    picks = np.zeros(sampler_rows(count), np.int32)
    picks[:count] = np.arange(count)
    return picks


def copied_slots(slots: Slots, run: Callable[..., Any]) -> Slots:
    """A copy of the sampler's state, because the sampler writes in place."""
    return run("a copy of the sampler's state", _copied, ("copied",), slots)


def _copy(slots: Slots) -> Slots:
    return jax.tree.map(jnp.copy, slots)


_copied = Program(_copy)
