"""Stochastic gradient descent, and RMSProp, which divides by the root of the mean of squared gradients.

    SGD        m <- momentum m + g;                              w <- w - rate (m + decay w)
    RMSProp    v <- b2 v + (1 - b2) g²;   m <- momentum m + g / (sqrt(v) + eps);   w <- w - rate (m + decay w)

RMSProp has no bias correction, and adds eps outside the root, as in torch. Its weight decay is decoupled, where torch adds it to the
gradient.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.optimizers.base import Meanings, Optimizer, Transformation, add_decay
from argosy.train.schedule import Factor


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum if set."""

    momentum: float = Field(0.0, ge=0, lt=1)
    """Decay rate of the sum of gradients; 0 turns momentum off."""
    nesterov: bool = False
    """Uses Nesterov momentum."""

    def rule(self, rate: Factor, meanings: Meanings, decays: Mapping[str, Any]) -> Transformation:
        import optax

        trace = optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()
        return optax.chain(trace, add_decay(decays), optax.scale_by_learning_rate(rate))


class RMSProp(Optimizer):
    """The gradient divided by the root of its mean square. Hinton 2012 (lecture 6e of Neural Networks for Machine Learning)."""

    b2: Annotated[float, Also("alpha", "rms_decay", "smoothing_constant")] = Field(0.99, ge=0, lt=1)
    """Decay rate of the mean of squared gradients."""
    eps: Annotated[float, Also("epsilon")] = Field(1e-8, gt=0)
    """Added to the root of that mean."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Decay rate of the sum of updates; 0 turns momentum off."""
    centered: bool = False
    """Subtracts the square of the mean gradient from the mean square, which makes it a variance."""

    def rule(self, rate: Factor, meanings: Meanings, decays: Mapping[str, Any]) -> Transformation:
        import optax

        square = optax.scale_by_stddev if self.centered else optax.scale_by_rms
        trace = optax.trace(self.momentum) if self.momentum else optax.identity()
        mean = square(self.b2, self.eps, eps_in_sqrt=False)
        return optax.chain(mean, trace, add_decay(decays), optax.scale_by_learning_rate(rate))
