"""The time of a step of a server whose tokens are drafted.

A step with k drafts samples them one after the other, by a pass of the draft model each, or finds them in the text (n-grams), and
computes k + 1 rows of each sequence at once, which read the weights once. If each draft is accepted
with probability a once those before it are, a sequence gets (1 - a^(k + 1)) / (1 - a) tokens of k drafts on average (Leviathan et al.
2023, arXiv:2211.17192).
"""

from dataclasses import replace

from argosy.infer.settings import DraftModel, NGram
from argosy.observe.hlo.estimate import Prices
from argosy.run.plan.serving import PlannedModel, ServingStep
from argosy.run.plan.serving_cpu import serving_step

DRAFTING = "drafting"


def tokens_per_step(speculative: NGram | DraftModel | None, acceptance: float) -> float:
    """Tokens that a sequence gets of a step, on average."""
    if speculative is None:
        return 1.0
    return sum(acceptance**i for i in range(speculative.tokens + 1))


def as_draft(draft: PlannedModel, model: PlannedModel) -> PlannedModel:
    """A model as it drafts for another: all its layers keep all tokens, in the pages of the other."""
    return replace(draft, needs=replace(draft.needs, longest=model.context, windows={}))


def drafted_step(model: PlannedModel, decodes: int, prompt: int, length: int, prices: Prices) -> ServingStep:
    """The time of a step with its drafts; without speculation that of a plain one. The arguments are those of `step_work`."""
    speculative = model.settings.speculative
    drafts = 0 if speculative is None else speculative.tokens
    step = serving_step(model, decodes * (1 + drafts), prompt, length, prices)
    if model.draft is None:
        return replace(step, decodes=decodes)
    # A prompt is computed by the draft model too, for its cache.
    passes = [serving_step(model.draft, 0, prompt, length, prices)] if prompt else []
    passes += [serving_step(model.draft, decodes, 0, length, prices)] * (drafts if decodes else 0)
    return replace(step, decodes=decodes, by_kind={**step.by_kind, DRAFTING: sum(draft_step.seconds for draft_step in passes)})
