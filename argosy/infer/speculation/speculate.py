"""Speculative decoding: a step computes the last token of a sequence and several drafts of the tokens that follow, and keeps the drafts
that the sampler would have drawn (Leviathan et al. 2022, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318).

It differs from these papers in that no ratio of probabilities decides. Each position is sampled as in a step without drafts, with the
random key of that token and the penalties of the tokens before it. A draft is accepted if it equals the sampled token. The first that
differs is replaced by the sampled token, and the drafts after it are dropped. So, for the same seed, a completion is the same as
without speculation (up to rounding), at any temperature and with any drafts. For drafts without a distribution, such as n-grams, this
accepts exactly as often as rejection sampling. A draft model draws with the same keys, because two distributions that share their
Gumbel noise often draw the same token (a coupling; Daliri et al. 2024, arXiv:2408.07978).

    plan       the scheduler gives each decoding request room for drafts in its pages
    draft      a drafter (`infer.speculation.drafts`) proposes tokens
    forward    the model computes rows of [known tokens, drafts], with logits at the last known token and at each draft
    verify     the sampler draws a token at these positions in order, until the first that differs from its draft
    roll back  Pages need nothing, because the length of a request says how many of its tokens count. States of recurrent layers are
               restored from a copy, and the accepted tokens are computed again at the beginning of the request's next row.

The host needs a step's tokens to draft the next ones, so with speculation a step is read before the next is planned. If no request has
a draft, a step has plain decoding rows. If one has, all decoding requests get rows of the same width, because rows of two widths would
square the number of programs. A request whose biases or grammar depend on the completion has no drafts, because only the host knows
these.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from argosy.core.counts import plural
from argosy.infer import settings
from argosy.infer.engine.batch import StepBatch
from argosy.infer.engine.scheduled import ScheduledRequest
from argosy.infer.engine.scheduler import Scheduler, StepPlan
from argosy.infer.sampling.sampler import SamplerOutput, Slots, sample_rows
from argosy.infer.speculation.draft_model import ModelDrafter
from argosy.infer.speculation.drafts import DraftContext, Drafter, NGramDrafter
from argosy.infer.speculation.mtp import MTPDrafter
from argosy.models.parts.attention.cache import Caches, Specs, constrain_caches, restore, snapshot
from argosy.ops.programs.programs import Program
from argosy.parallel.scope import on_several_devices


class VerifiedTokens(NamedTuple):
    """The tokens that a step with drafts sampled.

    sampled: the sampled tokens, as arrays [W B ...] by position and row.
    counts: number of sampled tokens of each row that are kept, its accepted drafts and one more.
    rejected: whether a draft of the row was rejected.
    """

    sampled: SamplerOutput
    counts: Int[Array, "B"]
    rejected: Bool[Array, "B"]


def _verified(
    slots: Slots, logits: Float[Array, "WB V"], owners: Int[Array, "B"], drafts: Int[Array, "K B"]
) -> tuple[Slots, VerifiedTokens]:
    """Samples a token for each row, and then further ones as long as the row's drafts equal the sampled tokens. Returns the sampler's
    updated state and the tokens.

    Args:
        logits: the logits at the last known token of all rows, then at their first drafts, and so on; W = K + 1 positions of B rows.
        owners: the slot of each row; -1: none.
        drafts: the drafts of each row, followed by -1.
    """
    K, B = drafts.shape
    by_position = logits.reshape(K + 1, B, -1)
    guesses = jnp.concatenate([drafts, jnp.full((1, B), -1, jnp.int32)])
    empty = jax.tree.map(
        lambda a: jnp.zeros((K + 1, *a.shape), a.dtype), jax.eval_shape(sample_rows, slots, by_position[0], owners)[1]
    )

    def sample_next(state: Any) -> Any:
        at, live, slots, out, counts = state
        slots, new = sample_rows(slots, by_position[at], jnp.where(live, owners, -1))
        out = jax.tree.map(lambda whole, part: whole.at[at].set(part), out, new)
        return at + 1, live & (new.tokens == guesses[at]), slots, out, counts + live.astype(jnp.int32)

    start = (jnp.int32(0), owners >= 0, slots, empty, jnp.zeros(B, jnp.int32))
    _, _, slots, out, counts = jax.lax.while_loop(lambda state: state[1].any(), sample_next, start)
    return slots, VerifiedTokens(out, counts, counts < 1 + (drafts >= 0).sum(0, dtype=jnp.int32))


verify = Program(_verified, donate=0)


class Speculation:
    """Builds and verifies the engine's steps with drafts.

    Args:
        drafter: the drafter that proposes tokens.
        specs: the specs of the model's caches.

    draft_width: the most tokens of a decoding row, drafts included.
    keeps_states: whether the model has recurrent states, which must be rolled back.
    rows: number of rows with drafts so far.
    drafted: number of drafts so far.
    accepted: number of accepted drafts so far, by their index in the row.
    """

    def __init__(self, drafter: Drafter, specs: Specs, context: DraftContext):
        self.drafter, self.batches, self.run, longest = drafter, context.batches, context.run, context.max_length
        self.draft_width = drafter.tokens + 1
        self.keeps_states = any(
            entry.kind != "token" for spec, _ in specs.values() for entry in spec.entries(longest, slack=longest)
        )
        self._copied = Program(partial(snapshot, specs))
        self._restored = Program(partial(_restored, specs), donate=0)
        self.rows = self.drafted = 0
        self.accepted = [0] * drafter.tokens

    def room(self, request: ScheduledRequest) -> int:
        """The most drafts that a request may have in the next step."""
        if request.stepwise:
            return 0
        remaining = request.max_tokens - request.completion_length - 1
        return max(0, min(self.draft_width - 1 - request.recompute, remaining))

    def build(self, plan: StepPlan, slots: Slots) -> StepBatch:
        """Turns a plan into arrays, with drafts. All tokens of its requests must have been read."""
        drafts = self.drafter.draft(plan, slots)
        if not any(drafts) and not any(request.recompute for request in plan.decodes):
            return self.batches.build(plan)
        starts = [request.computed - 1 - request.recompute for request in plan.decodes]
        rows = [[*s.tokens[start:], *guesses] for s, start, guesses in zip(plan.decodes, starts, drafts, strict=True)]
        return self.batches.build_drafted(plan, starts, rows, drafts, self.draft_width)

    # ---------------------------------------------------------------- a step with drafts

    def copied_states(self, caches: Caches, step: StepBatch) -> Any:
        """Copies the recurrent states of the requests that are sampled, before the step. None if the model has no such states."""
        if not self.keeps_states:
            return None
        count = len(step.owners)
        return self.run(f"copies of {count} states", self._copied, ("copies", count), caches, step.owners)

    def verified(self, slots: Slots, logits: Any, step: StepBatch) -> tuple[Slots, VerifiedTokens]:
        """Samples the tokens of a step and verifies its drafts."""
        count = len(step.owners)
        label = f"the sampler for {plural(count, 'row')} of {plural(self.draft_width, 'token')}"
        return self.run(label, verify, ("verify", count), slots, logits, step.owners, step.drafts)

    def rolled_back(self, caches: Caches, copies: Any, step: StepBatch, verified: VerifiedTokens) -> Caches:
        """Restores the recurrent states of requests with a rejected draft, from the copies of `copied_states`. Returns the caches."""
        if copies is None:
            return caches
        count = len(step.owners)
        rows = step.owners, verified.rejected
        return self.run(f"restoring {count} states", self._restored, ("restored", count), caches, copies, *rows)

    def landed(self, scheduler: Scheduler, step: StepBatch, verified: VerifiedTokens) -> list[tuple[ScheduledRequest, tuple[int, int]]]:
        """Reads the results of a step, and updates the scheduler and the counts. Returns for each kept token its request, and its index
        (position, row) in the arrays of `verified.sampled`."""
        counts, rejected = np.asarray(verified.counts).tolist(), np.asarray(verified.rejected).tolist()
        assert step.drafts is not None
        proposed = (step.drafts >= 0).sum(0).tolist()
        places = []
        for i, request in enumerate(step.due):
            if request.done:
                continue
            scheduler.accept_drafts(request, counts[i], rolled_back=self.keeps_states and rejected[i])
            places += [(request, (at, i)) for at in range(counts[i])]
            if proposed[i]:
                self.rows += 1
                self.drafted += proposed[i]
                for at in range(counts[i] - 1):
                    self.accepted[at] += 1
        return places


def _restored(
    specs: Specs, caches: Caches, copies: Caches, owners: Int[Array, "B"], rejected: Bool[Array, "B"]
) -> Caches:
    caches = restore(specs, caches, copies, jnp.where(rejected, owners, -1))
    return constrain_caches(specs, caches) if on_several_devices() else caches


def speculation_of(method: Any, model: Any, draft: Any, specs: Specs, context: DraftContext) -> Speculation | None:
    """Builds the speculation for the setting `engine.speculative`; None if it is off.

    Args:
        method: the value of the setting.
        model: the engine's model.
        draft: the module of the draft model, if the method needs one.
        specs: the specs of the model's caches.

    Raises:
        BadInput: the draft model does not fit the model, or the model has no module for multi-token prediction.
    """
    if method is None:
        return None
    if isinstance(method, settings.NGram):
        drafter: Drafter = NGramDrafter(method)
    elif isinstance(method, settings.DraftModel):
        if draft is None:
            raise ValueError("Engine(..., draft=MODULE): the settings ask for a draft model")
        drafter = ModelDrafter(draft, method.tokens, model.config.vocab, context)
    else:
        drafter = MTPDrafter(model, method.tokens, context)
    return Speculation(drafter, specs, context)
