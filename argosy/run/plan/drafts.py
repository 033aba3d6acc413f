"""Predicts the time of a server's step with speculative decoding.

A step first makes k drafts of each sequence. A draft model samples them one after the other, with a forward pass each; n-grams are
found in the text. Then the step computes k + 1 tokens of each sequence at once, which reads the weights once. If each draft is accepted
with probability a given that those before it are, a sequence advances by (1 - a^(k + 1)) / (1 - a) tokens on average (Leviathan et al.
2023, arXiv:2211.17192).
"""

from dataclasses import replace

from argosy.infer.settings import DraftModel, NGram
from argosy.observe.hlo.estimate import Prices
from argosy.run.plan.serving import PlannedModel, ServingStep
from argosy.run.plan.serving_cpu import serving_step

DRAFTING = "drafting"


def tokens_per_step(speculative: NGram | DraftModel | None, acceptance: float) -> float:
    """Returns the average number of tokens by which a step advances a sequence.

    Args:
        speculative: the settings of speculative decoding; None without it.
        acceptance: the probability that a draft is accepted if those before it are.
    """
    if speculative is None:
        return 1.0
    return sum(acceptance**i for i in range(speculative.tokens + 1))


def as_draft(draft: PlannedModel, model: PlannedModel) -> PlannedModel:
    """Returns a model as it drafts for another model: all its layers keep all tokens, in the KV-cache pages of the other model."""
    return replace(draft, needs=replace(draft.needs, longest=model.context, windows={}))


def drafted_step(model: PlannedModel, decodes: int, prompt: int, length: int, prices: Prices) -> ServingStep:
    """Predicts the time of a step, including its drafts if the engine speculates. The arguments are those of `step_work`."""
    speculative = model.settings.speculative
    drafts = 0 if speculative is None else speculative.tokens
    step = serving_step(model, decodes * (1 + drafts), prompt, length, prices)
    if model.draft is None:
        return replace(step, decodes=decodes)
    # A prompt is computed by the draft model too, for its cache.
    passes = [serving_step(model.draft, 0, prompt, length, prices)] if prompt else []
    passes += [serving_step(model.draft, decodes, 0, length, prices)] * (drafts if decodes else 0)
    return replace(step, decodes=decodes, by_kind={**step.by_kind, DRAFTING: sum(draft_step.seconds for draft_step in passes)})
