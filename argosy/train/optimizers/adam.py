"""AdamW, and NAdamW, its form with Nesterov's momentum.

    m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g²
    w <- w - rate (m̂ / (sqrt(v̂) + eps) + decay w)           m̂ = m / (1 - b1^t), v̂ = v / (1 - b2^t)

NAdamW replaces m̂ by b1 m / (1 - b1^(t+1)) + (1 - b1) g / (1 - b1^t) (Dozat 2016). Its b1 is constant; that of torch's NAdam grows over
the first steps.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from argosy.core.settings import Also
from argosy.train.optimizers.base import Meanings, Optimizer, Transformation, add_decay
from argosy.train.schedule import Factor


class AdamW(Optimizer):
    """Adam with decoupled weight decay. Loshchilov and Hutter 2017 (arXiv:1711.05101)."""

    b1: Annotated[float, Also("beta1", "adam_beta1", "adam_b1")] = Field(0.9, ge=0, lt=1)
    """Decay rate of the mean of gradients."""
    b2: Annotated[float, Also("beta2", "adam_beta2", "adam_b2")] = Field(0.95, ge=0, lt=1)
    """Decay rate of the mean of squared gradients."""
    eps: Annotated[float, Also("adam_epsilon", "adam_eps", "epsilon")] = Field(1e-8, gt=0)
    """Added to the square root of the mean of squared gradients, to avoid division by zero."""

    nesterov: ClassVar[bool] = False

    def rule(self, rate: Factor, meanings: Meanings, decays: Mapping[str, Any]) -> Transformation:
        import optax

        mean = optax.scale_by_adam(self.b1, self.b2, self.eps, nesterov=self.nesterov)
        return optax.chain(mean, add_decay(decays), optax.scale_by_learning_rate(rate))


class NAdamW(AdamW):
    """AdamW with Nesterov's momentum. Dozat 2016 (openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ)."""

    nesterov: ClassVar[bool] = True
