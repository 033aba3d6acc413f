"""Lion: the sign of a mix of gradient and momentum.

    w <- w - rate (sign(b1 m + (1 - b1) g) + decay w);   m <- b2 m + (1 - b2) g
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from argosy.train.optimizers.base import Meanings, Optimizer, Transformation, add_decay
from argosy.train.schedule import Factor


class Lion(Optimizer):
    """The sign of a mix of gradient and momentum. Chen et al. 2023 (arXiv:2302.06675). It needs about a tenth of Adam's learning
    rate and ten times its weight decay."""

    b1: float = Field(0.9, ge=0, lt=1)
    """Share of the momentum in the update."""
    b2: float = Field(0.99, ge=0, lt=1)
    """Decay rate of the momentum."""

    def rule(self, rate: Factor, meanings: Meanings, decays: Mapping[str, Any]) -> Transformation:
        import optax

        return optax.chain(optax.scale_by_lion(self.b1, self.b2), add_decay(decays), optax.scale_by_learning_rate(rate))
