"""The interface of drafters, and the simplest of them, by n-grams.

    NGramDrafter    proposes the tokens that followed an earlier occurrence of the last tokens; on the host, without a model
    ModelDrafter    drafts with a second model (`infer.speculation.draft_model`)
    MTPDrafter      drafts with the model's module for multi-token prediction (`infer.speculation.mtp`)
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

    batches: the builder of step arrays.
    max_length: the most tokens of a sequence.
    home: the placement of caches (`infer.placement`).
    run: `Runner.run`, which counts compilations.
    programs: the engine's compiled programs.
    """

    batches: BatchBuilder
    max_length: int
    home: Home
    run: Callable[..., Any]
    programs: Programs

    def page_bytes(self, specs: Specs, dtype: Any) -> int:
        """The bytes that caches with these specs take for each page of the engine's cache."""
        return self._needs(specs, dtype).bytes(home_mesh(self.home), CacheSize(1, {}))

    def allocated(self, specs: Specs, pages: int, dtype: Any) -> Caches:
        """Allocates caches with these specs and `pages` pages. All their layers keep all tokens."""
        needs, slots = self._needs(specs, dtype), self.batches.settings.slots
        return reserve_caches(specs, self.home, lambda: needs.empty(slots, CacheSize(pages, {})))

    def _needs(self, specs: Specs, dtype: Any) -> CacheNeeds:
        settings = self.batches.settings
        return CacheNeeds(specs, settings.page, dtype, self.max_length, {}, settings.cache_dtype)


class Drafter:
    """Proposes the next tokens of sequences. A wrong draft costs time only.

    tokens: the most drafts per sequence and step.
    page_bytes: bytes of the drafter's own caches for each page of the engine's cache.
    caches: the drafter's own caches; None: it has none.
    """

    tokens: int
    page_bytes: int = 0
    caches: Caches | None = None

    def allocate(self, pages: int) -> None:
        """Allocates the drafter's own caches, with as many pages as the engine's cache."""

    def draft(self, plan: StepPlan, slots: Slots) -> list[list[int]]:
        """Returns the drafts of each decoding sequence of a plan, at most `plan.draft_room` each. A drafter with its own caches also
        computes the plan's prompts here.

        Args:
            slots: the sampler's state, for drafters that sample. It is not changed.
        """
        raise NotImplementedError

    def observe(self, step: StepBatch, hidden: Any) -> None:
        """Receives the hidden states before the model's head, for the tokens of the step that was drafted last."""

    def warm_up(self, slots: Slots) -> None:
        """Compiles the programs that `draft` may need."""


class NGramDrafter(Drafter):
    """Prompt lookup (Saxena 2023): drafts the tokens that followed an earlier occurrence of the sequence's last tokens.

    Of several occurrences, the longest match is taken, and of equal ones the latest. If fewer tokens than wanted follow it, the drafts
    repeat themselves, so that a text with a short period is drafted to any length.
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
    """The tokens of a sequence as an array. Each call of `grown` copies only the new tokens into it."""

    def __init__(self) -> None:
        self._ids, self._count = np.zeros(256, np.int32), 0

    def grown(self, tokens: Sequence[int]) -> Int[np.ndarray, " T"]:
        if len(tokens) > len(self._ids):
            self._ids = np.concatenate([self._ids[: self._count], np.zeros(2 * len(tokens) - self._count, np.int32)])
        self._ids[self._count : len(tokens)] = tokens[self._count :]
        self._count = len(tokens)
        return self._ids[: self._count]


def last_occurrence(ids: Int[np.ndarray, " T"], least: int, most: int) -> int | None:
    """The index after the latest earlier occurrence of the last tokens, as many of them as possible, from `least` to `most`; None if
    there is no occurrence. Searching 8,000 tokens takes 10 microseconds."""
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
    """Samples drafts one after the other, with the settings, penalties and random keys of the tokens that they guess.

    Args:
        room: number of drafts to sample for each decoding sequence of the plan.
        logits: the logits for the first draft.
        passed: runs a pass over the previous draft, and returns the logits for the next one. Its arguments are the index of the next
            draft, whether each sequence gets one, and the sampler's state, whose `last` is the previous draft.
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
    """The arrays of a pass over one token of each live sequence.

    Args:
        live: whether each decoding sequence of the plan takes part.
        before: number of tokens before that token, for each sequence.
    """
    sizes = batches.decode_sizes(len(live))
    words = empty_words(sizes)
    d, _, _ = split_words(words, sizes)
    for i, (sequence, on) in enumerate(zip(plan.decodes, live, strict=True)):
        if on:
            d["slot"][i], d["length"][i] = sequence.slot, before[i]
            batches.write_pages(d, i, sequence)
    return sizes, words


def first_rows(count: int) -> np.ndarray:
    """The indices of the first `count` rows, padded to a number of rows that the sampler is compiled for."""
    picks = np.zeros(sampler_rows(count), np.int32)
    picks[:count] = np.arange(count)
    return picks


def copied_slots(slots: Slots, run: Callable[..., Any]) -> Slots:
    """Copies the sampler's state, because the sampler updates it in place."""
    return run("a copy of the sampler's state", _copied, ("copied",), slots)


def _copy(slots: Slots) -> Slots:
    return jax.tree.map(jnp.copy, slots)


_copied = Program(_copy)
