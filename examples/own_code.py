"""Parts of a run that are one's own: an objective, an optimizer, a schedule, a source, a map, a reward and an algorithm.

    argosy train tiny objective=examples/own_code.py:Focal objective.gamma=2 optimizer=examples/own_code.py:SignSGD \\
        schedule=examples/own_code.py:Halving data.source=examples/own_code.py:Sums
    argosy train grpo model=FOLDER data.source=prompts.jsonl objective=examples/own_code.py:Centered \\
        reward=examples/own_code.py:short

Classes of settings have typed fields with a text under each; their keys are checked like all others, and imports of jax stand inside
functions, so that a mistake is answered before it loads. docs/guides/your-own-code.md explains each.
"""

import random

from pydantic import Field

from argosy.data.sources import Document, Source
from argosy.rl.algorithms.grpo import GRPO
from argosy.rl.policy.settings import Scale
from argosy.train.objectives.objective import TokenObjective
from argosy.train.optimizers.base import Optimizer, add_decay
from argosy.train.schedule import Schedule


class Focal(TokenObjective):
    """Cross-entropy in which tokens that are predicted well count little. Lin et al. 2017 (arXiv:1708.02002)."""

    gamma: float = Field(2.0, ge=0)
    """Power of 1 - p that multiplies the loss of a token with probability p. 0: plain cross-entropy."""

    def reads(self):
        from argosy.train.objectives.tokens import FIELDS

        return FIELDS

    def __call__(self, models, batch, key):
        import jax.numpy as jnp

        from argosy.models.parts.attention.attend import Packed
        from argosy.models.parts.inputs import batch_inputs
        from argosy.train.objectives.loss import Loss, WeightedMean
        from argosy.train.objectives.tokens import losses

        model, mask = models["model"], batch["mask"]
        x, _, _ = model.hidden(batch_inputs(batch), Packed(batch["segments"]))
        nll, _ = losses(self, model, x, batch["targets"])
        focal = (1 - jnp.exp(-nll)) ** self.gamma * nll
        weight = jnp.sum(mask)
        cross_entropy = WeightedMean(jnp.sum(nll * mask), weight)
        return Loss(WeightedMean(jnp.sum(focal * mask), weight), {"cross_entropy": cross_entropy})


class SignSGD(Optimizer):
    """Steps of one size in the direction of each gradient's sign. Bernstein et al. 2018 (arXiv:1802.04434)."""

    momentum: float = Field(0.9, ge=0, lt=1)
    """Decay rate of the mean of gradients whose sign is taken."""

    def rule(self, rate, meanings, decays):
        import jax.numpy as jnp
        import optax

        mean = optax.ema(self.momentum, debias=False)
        sign = optax.stateless(lambda updates, params: {a: jnp.sign(u) for a, u in updates.items()})
        return optax.chain(mean, sign, add_decay(decays), optax.scale_by_learning_rate(rate))


class Halving(Schedule):
    """Halves the learning rate every so many steps."""

    every: int = Field(100, gt=0)
    """Steps between two halvings."""

    def build(self, steps):
        return self.warmed_up(round(self.warmup), lambda step: 0.5 ** (step // self.every))


class Sums(Source):
    """Ten thousand sums in words of digits, the same ones in the same order every time."""

    def documents(self):
        rng = random.Random(0)
        for _ in range(10_000):
            a, b = rng.randrange(1000), rng.randrange(1000)
            yield Document(f"{a} + {b} = {a + b}\n")

    def fingerprint(self):
        # The text of this file is added to it.
        return {"source": "sums"}


def lower(row):
    """A map of records: `data.map=examples/own_code.py:lower`."""
    return row | {"text": row["text"].lower()}


def short(completions, **columns):
    """A reward: `reward=examples/own_code.py:short`."""
    return [-len(completion) / 100 for completion in completions]


class Centered(GRPO):
    """GRPO whose advantages are not divided by the standard deviation of their group."""

    scale: Scale = "none"
    """What advantages are divided by."""
