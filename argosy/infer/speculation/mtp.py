"""Drafts by the model's own module for multi-token prediction (`parts.ahead`).

The module reads the model's hidden state at a token, and the token after it, so it runs one step behind the model. When a step's tokens
are known, the module computes the same positions in the same rows, with the same page tables. Its prediction at the last position is
the first draft. For further drafts it reads its own output, as vLLM does. Published models have one such module; of several, the first
is used.

The module's cache may be wrong in two cases, and then drafts are accepted less often, while completions stay the same. First, its entry
for the last token of a cached prefix depends on the next token, which was that of another sequence. Second, a page can be shared within
the step that computes it, but the module fills it one step later, and not at all if the sequence that computed the page has ended by
then.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.infer.engine.batch import StepBatch, sampler_rows
from argosy.infer.engine.scheduled import ScheduledRequest
from argosy.infer.engine.scheduler import StepPlan
from argosy.infer.forward.layers import AbsentWeights, traced_model
from argosy.infer.forward.step import StepSizes, read_step, split_words
from argosy.infer.sampling.sampler import Slots
from argosy.infer.speculation.drafts import (
    DraftContext,
    Drafter,
    copied_slots,
    decoding_rows,
    first_rows,
    sampled_drafts,
)
from argosy.models.parts.attention.cache import Caches, Specs, constrain_caches
from argosy.models.parts.attention.ragged import rows_share_pages
from argosy.models.parts.inputs import as_inputs
from argosy.models.parts.weight import Leaves, split, variable
from argosy.ops.programs.programs import Program
from argosy.parallel.scope import on_several_devices


class _Seen(NamedTuple):
    """The model's latest step, which the module has not computed yet.

    sequences: the sequence in each slot, with its number of preemptions at that time.
    step: the arrays of the step.
    hidden: the hidden states before the head.
    """

    sequences: dict[int, tuple[ScheduledRequest, int]]
    step: StepBatch
    hidden: Array


class MTPDrafter(Drafter):
    """Drafts with the model's module for multi-token prediction.

    Args:
        model: the engine's model. Its weights are read at each step.
        tokens: number of drafts per sequence and step.

    Raises:
        BadInput: the model has no such module.
    """

    def __init__(self, model: Any, tokens: int, context: DraftContext):
        if getattr(model, "mtp", None) is None:
            raise BadInput("the model has no module for multi-token prediction", hint="speculative=ngram, or a draft model")
        self.tokens, self.context, self.batches, self.run = tokens, context, context.batches, context.run
        graph, weights = split(model)
        inside = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in weights.items() if name.startswith("layers.")}
        self.variables = {name: variable(model, name) for name in weights if name not in inside}
        depth, self.dtype, self._width = getattr(model.mtp, "0"), model.dtype, model.config.width
        self.specs: Specs = {"mtp": (depth.block.holds(depth.each), None)}
        assert rows_share_pages(self.specs, context.max_length, slack=context.max_length), "rolled back by lengths alone"
        self.page_bytes = context.page_bytes(self.specs, self.dtype)
        absent = AbsentWeights(inside)
        self._ahead, self._head = _ahead(graph, absent, self.dtype), _head(graph, absent, self.dtype)
        self.caches: Any = None
        self._plan: StepPlan | None = None
        self._seen: _Seen | None = None

    def allocate(self, pages: int) -> None:
        self.caches = self.context.allocated(self.specs, pages, self.dtype)

    def observe(self, step: StepBatch, hidden: Any) -> None:
        if self._plan is not None:
            running = [*self._plan.decodes, *(chunk.request for chunk in self._plan.chunks)]
            self._seen = _Seen({s.slot: (s, s.preemptions) for s in running}, step, hidden)

    def draft(self, plan: StepPlan, slots: Slots) -> list[list[int]]:
        seen, self._plan, self._seen = self._seen, plan, None
        if seen is None:
            return [[] for _ in plan.decodes]
        weights = {name: v.get_value() for name, v in self.variables.items()}
        words, places = _shifted(seen)
        x = self._passed(weights, seen.hidden, slots.last, words, seen.step.sizes)
        room = [most if sequence in places else 0 for sequence, most in zip(plan.decodes, plan.draft_room, strict=True)]
        if not any(room):
            return [[] for _ in room]
        picks = np.zeros(sampler_rows(len(room)), np.int32)
        picks[: len(room)] = [places.get(sequence, 0) for sequence in plan.decodes]
        x, logits = self._after(weights, x, picks)

        def passed(at: int, live: list[bool], state: Slots) -> Array:
            nonlocal x
            before = [len(sequence.tokens) + at - 2 for sequence in plan.decodes]
            sizes, words = decoding_rows(self.batches, plan, live, before)
            x = self._passed(weights, self._select(x, np.arange(sizes.decodes)), state.last, words, sizes)
            x, logits = self._after(weights, x, first_rows(len(live)))
            return logits

        return sampled_drafts(plan, room, logits, slots, passed, self.run)

    def _passed(self, weights: Leaves, x: Any, last: Any, words: np.ndarray, sizes: StepSizes) -> Any:
        label = f"multi-token prediction of {sizes.tokens} tokens"
        x, self.caches = self.run(label, self._ahead, ("mtp", *sizes), weights, x, self.caches, last, words, sizes)
        return x

    def _after(self, weights: Leaves, x: Any, picks: np.ndarray) -> tuple[Any, Any]:
        """The module's output at the tokens `picks`, and the logits there."""
        x = self._select(x, picks)
        return x, self.run(f"the head for {plural(len(picks), 'row')}", self._head, ("head", len(picks)), weights, x)

    def _select(self, x: Any, places: np.ndarray) -> Any:
        size = ("taken", x.shape[1], len(places))
        return self.run(f"{len(places)} of {x.shape[1]} tokens", _take_program, size, x, places.astype(np.int32))

    def warm_up(self, slots: Slots) -> None:
        # The engine's warm-up has called `observe` for a step that was not computed.
        self._plan = self._seen = None
        copied_slots(slots, self.run)
        weights = {name: v.get_value() for name, v in self.variables.items()}
        counts = {sampler_rows(n) for n in range(1, self.batches.settings.slots + 1)}
        for step in (*self.batches.all_batches(), *self.batches.all_batches(self.tokens + 1)):
            hidden = jax.ShapeDtypeStruct((1, step.sizes.tokens, self._width), self.dtype, sharding=self.context.home)
            x = self._passed(weights, hidden, slots.last, step.words, step.sizes)
            for count in counts:
                y, _ = self._after(weights, x, np.zeros(count, np.int32))
                self._select(y, np.zeros(step.sizes.decodes or 1, np.int32))


def _shifted(seen: _Seen) -> tuple[np.ndarray, dict[ScheduledRequest, int]]:
    """Rewrites the rows of a step for the module: each token is replaced by the token after it. Rejected drafts are left out, and so
    are rows whose sequence has ended or was preempted. Also returns, for each sequence whose known tokens end with its row, the index
    of the row's last token."""
    words, places, at = seen.step.words.copy(), {}, 0
    for part in split_words(words, seen.step.sizes):
        width = part["tokens"].shape[1] if "tokens" in part else 1
        for i, slot in enumerate(part["slot"].tolist()):
            if slot < 0:
                continue
            sequence, preemptions = seen.sequences[slot]
            start, count = int(part["length"][i]), int(part["new"][i]) if "new" in part else 1
            following = sequence.tokens[start + 1 : start + 1 + count]
            if sequence.slot != slot or sequence.preemptions != preemptions or not following:
                part["slot"][i], part["table"][i] = -1, -1
                continue
            if "new" in part:
                part["new"][i] = len(following)
                part["tokens"][i, : len(following)] = following
            if start + 1 + len(following) == len(sequence.tokens):
                places[sequence] = at + i * width + len(following) - 1
        at += len(part["slot"]) * width
    return words, places


@lru_cache(maxsize=16)
def _ahead(graph: Any, absent: AbsentWeights, dtype: Any) -> Any:
    """(weights outside the layers, hidden states before the head, caches, last, words, StepSizes) -> (the module's output, caches)."""

    def ahead(weights: Leaves, x: Array, caches: Caches, last: Array, words: Array, sizes: StepSizes) -> tuple[Array, Caches]:
        model = traced_model(graph, weights, dtype, absent)
        tokens, attend = read_step(last, words, sizes)
        # The module reads token ids alone, so drafts after an image may be accepted less often.
        x, cache, _ = model.ahead(1, x, as_inputs(tokens).ids, attend, caches["mtp"])
        caches = {"mtp": cache}
        if on_several_devices():
            depth = getattr(model.mtp, "0")
            caches = constrain_caches({"mtp": (depth.block.holds(depth.each), None)}, caches)
            x = jax.lax.with_sharding_constraint(x, PartitionSpec())
        return x, caches

    return Program(ahead, donate=2, static=5)


@lru_cache(maxsize=16)
def _head(graph: Any, absent: AbsentWeights, dtype: Any) -> Any:
    """(weights outside the layers, the module's output at some tokens [1 B D]) -> logits [B V]."""

    def head(weights: Leaves, x: Array) -> Array:
        logits = traced_model(graph, weights, dtype, absent).unembed(x)[0]
        return jax.lax.with_sharding_constraint(logits, PartitionSpec()) if on_several_devices() else logits

    return Program(head)


def _take(x: Float[Array, "1 tokens D"], places: Int[Array, "B"]) -> Float[Array, "1 B D"]:
    return jnp.take(x, places, axis=1, mode="clip")


_take_program = Program(_take)
