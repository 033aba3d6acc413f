"""Drafts by a second, smaller model.

The draft model has its own cache arrays, but uses the page tables of the engine's model. It computes every token that the engine's
model computes, prompts included, in the same pages. So only the scheduler deals with prefix caching, preemption and page tables. In
each step the draft model first computes the known tokens that it lacks, one or two for each sequence. Then it samples a draft, computes
it, samples the next, and so on. Drafts are sampled with the settings and the random keys of the tokens that they guess.

If the last draft of a step is accepted, its keys and values are written into the draft model's pages one step late. If the sequence
ends just then, another sequence may find this page in the prefix cache. Its drafts are then accepted less often; its completion is the
same.
"""

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Array

from argosy.core.errors import BadInput
from argosy.infer.engine.scheduled import ScheduledRequest
from argosy.infer.engine.scheduler import StepPlan
from argosy.infer.forward.passes import forward_of
from argosy.infer.forward.step import StepSizes
from argosy.infer.placement import weights_home
from argosy.infer.sampling.sampler import Slots
from argosy.infer.speculation.drafts import (
    DraftContext,
    Drafter,
    copied_slots,
    decoding_rows,
    first_rows,
    sampled_drafts,
)
from argosy.models.parts.attention.ragged import rows_share_pages
from argosy.models.parts.weight import split

# The most known tokens of a sequence that the draft model lacks: the last draft of the previous step, and the token sampled after it.
LACKING = 2


class ModelDrafter(Drafter):
    """Drafts with a second model.

    Args:
        model: the draft model, a decoder module. Its weights are read once.
        tokens: number of drafts per sequence and step.
        vocab: vocabulary size of the engine's model.

    Raises:
        BadInput: the draft model has another vocabulary, a context shorter than the engine's, other devices, or layers whose states
            cannot be rolled back.
    """

    def __init__(self, model: Any, tokens: int, vocab: int, context: DraftContext):
        self.tokens, self.context, self.run = tokens, context, context.run
        # All its layers keep all tokens. It reads token ids alone, so drafts after an image may be accepted less often.
        tables = context.batches.tables._replace(windows=())
        self.batches = replace(context.batches, tables=tables, text=True)
        _check(model, context.max_length, vocab)
        weights = split(model)[1]
        if weights_home(weights) != context.home:
            raise BadInput("the draft model is not on the devices of the model", hint="load both with the same `tensor`")
        # Its programs have keys of their own, because the draft model may be the engine's model with other caches.
        programs = context.programs
        self.forward = forward_of(model, weights, run=lambda program, at, *arguments: programs(program, ("draft", at), *arguments))
        if not rows_share_pages(self.forward.specs, context.max_length, slack=context.max_length):
            raise BadInput("the draft model has recurrent layers", hint="a draft model of attention layers only")
        self.weights, self.dtype = self.forward.prepared(weights), model.dtype
        self.page_bytes = context.page_bytes(self.forward.specs, self.dtype)
        self.caches: Any = None
        # Number of tokens of each sequence that are in the draft model's pages, including drafts that may have been rejected since.
        self._computed: WeakKeyDictionary[ScheduledRequest, int] = WeakKeyDictionary()

    def allocate(self, pages: int) -> None:
        self.caches = self.context.allocated(self.forward.specs, pages, self.dtype)

    def draft(self, plan: StepPlan, slots: Slots) -> list[list[int]]:
        for chunk in plan.chunks:
            self._computed[chunk.request] = chunk.start + len(chunk.tokens)
        if not plan.decodes:
            step = self.batches.build(plan)
            self._passed(step.sizes, step.words, step.picks, slots.last)
            return []
        starts = [min(self._computed[sequence], len(sequence.tokens) - 1) for sequence in plan.decodes]
        rows = [sequence.tokens[start:] for sequence, start in zip(plan.decodes, starts)]
        step = self.batches.build_drafted(plan, starts, rows, [[] for _ in rows], LACKING)
        logits = self._passed(step.sizes, step.words, step.picks.reshape(LACKING, -1)[0], slots.last)
        for sequence, room in zip(plan.decodes, plan.draft_room, strict=True):
            self._computed[sequence] = len(sequence.tokens) + max(room - 1, 0)
        if not any(plan.draft_room):
            return [[] for _ in rows]

        def passed(at: int, live: list[bool], state: Slots) -> Array:
            before = [len(sequence.tokens) + at - 1 for sequence in plan.decodes]
            sizes, words = decoding_rows(self.batches, plan, live, before)
            return self._passed(sizes, words, first_rows(len(live)), state.last)

        return sampled_drafts(plan, plan.draft_room, logits, slots, passed, self.run)

    def _passed(self, sizes: StepSizes, words: np.ndarray, picks: np.ndarray, last: Any) -> Any:
        label = f"the draft model for {sizes.decodes + sizes.drafted} decoding rows and {sizes.rows} x {sizes.width} prompt tokens"
        key = ("draft", *sizes, len(picks))
        logits, self.caches, _ = self.run(label, self.forward.step, key, self.weights, self.caches, last, words, picks, sizes)
        return logits

    def warm_up(self, slots: Slots) -> None:
        copied_slots(slots, self.run)
        for step in self.batches.all_batches():
            if not step.sizes.decodes or not step.sizes.rows:
                self._passed(step.sizes, step.words, step.picks, slots.last)
        for step in self.batches.all_batches(LACKING):
            self._passed(step.sizes, step.words, step.picks.reshape(LACKING, -1)[0], slots.last)


def _check(model: Any, context: int, vocab: int) -> None:
    config = model.config
    if not config.causal:
        raise BadInput("the draft model is an encoder", hint="a model that predicts tokens")
    if config.vocab != vocab:
        raise BadInput(f"the draft model has {config.vocab} tokens, the model {vocab}", hint="two models of one tokenizer")
    if config.context < context:
        hint = f"engine.context={config.context}, or another draft model"
        raise BadInput(f"the draft model's context of {config.context} tokens is shorter than {context}", hint=hint)
