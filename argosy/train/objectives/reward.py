"""Reward models: the likelihood of preferences by Bradley and Terry (1952), as in Ouyang et al. 2022, arXiv:2203.02155, equation 1.

    -log s(r(w) - r(l) - m)  +  center (r(w) + r(l))^2

r the score at the last token of a sequence, w the chosen and l the rejected answer, s the logistic function. m is the margin of a pair
by which it is to be preferred (Touvron et al. 2023, arXiv:2307.09288, equation 2); 0 where the data has none. The second term keeps
scores near 0 (Eisenstein et al. 2023, arXiv:2312.09244), since the first fixes only their difference.

Differences from the papers: none; the second term is 0 in the first paper, which shifts scores afterwards.
From TRL 1.16 (RewardTrainer): `center` is 0.01 by default, which TRL recommends and leaves off.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from argosy.train.objectives import Loss, Models
from argosy.train.objectives.routers import with_routers
from argosy.train.objectives.sequences import Pairs, SequenceLogps, last, pair_weights, preferred, scores
from argosy.train.preferences import RewardModel


def bradley_terry(
    how: RewardModel, found: Float[Array, "B s"], margin: Float[Array, "B s"], live: Float[Array, "B s"]
) -> Loss:
    """The loss of a batch from the scores of its sequences. margin: of a pair, in both of its rows."""
    chosen, rejected = found[::2], found[1::2]
    both = Pairs(SequenceLogps(chosen, chosen), SequenceLogps(rejected, rejected), live[::2])
    each = -jax.nn.log_sigmoid(chosen - rejected - margin[::2]) + how.center * (chosen + rejected) ** 2
    metrics = {
        "rewards/chosen": both.mean(chosen),
        "rewards/rejected": both.mean(rejected),
        "rewards/accuracy": both.mean(preferred(chosen, rejected, jnp.abs(chosen) + jnp.abs(rejected))),
        "rewards/margin": both.mean(chosen - rejected),
    }
    return Loss(both.mean(each), metrics)


def loss(how: RewardModel, models: Models, batch: dict[str, Array]) -> Loss:
    """Computes the objective."""
    each, aux = scores(models["model"], batch)
    found = last(each, batch["segments"], batch["live"].shape[1])
    made = bradley_terry(how, found, batch["margin"], batch["live"])
    return with_routers(made, models["model"], aux, pair_weights(batch["live"]))
