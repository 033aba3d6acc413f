"""Learning rate schedules: a factor on the peak learning rate by step. All begin with a linear warm-up from 0."""

import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from argosy.core.registry import Registry
from argosy.core.settings import Also, Settings

# Step (counted from 0) -> share of the peak learning rate.
Factor = Callable[[Any], Any]
# Names of a final rate.
_RATE = Also("min_lr", "end_lr", note="it is a share of the peak, not a rate: min_lr / optimizer.learning_rate")


class Schedule(Settings):
    """The settings of every schedule."""

    warmup: Annotated[
        float,
        Also(
            "warmup_steps",
            "warmup_ratio",
            "warmup_iters",
            "lr_scheduler.warmup_steps",
            "warmup_steps_fraction",
            "num_warmup_steps",
            "lr_warmup_steps",
        ),
    ] = Field(0.05, ge=0)
    """Steps of linear warm-up; below 1, a share of all steps."""

    def build(self, steps: int) -> Factor:
        raise NotImplementedError

    def warmed(self, steps: int, after: Factor, final: float = 1.0) -> Factor:
        """Warm-up followed by `after`, a function of the progress over the remaining steps: 0 at the first, 1 at the last.

        Args:
            final: the last value of `after`. If it is 0, progress is 1 one step after the last.
        """
        import jax.numpy as jnp

        warm = _count(self.warmup, steps)

        def factor(step: Any) -> Any:
            step = jnp.asarray(step, jnp.float32)
            progress = jnp.clip((step - warm) / max(1, span(steps - warm, final)), 0, 1)
            return jnp.where(step < warm, (step + 1) / max(1, warm), after(progress))

        return factor


def span(steps: int, final: float) -> int:
    """Steps from the first of a decay to the one that has its final rate. A rate of 0 would make the last step change nothing, so it
    comes one step after the last, as in transformers and torchtitan: a linear decay over n steps ends at 1 / n of the peak."""
    return steps - 1 if final else steps


def _count(value: float, steps: int) -> int:
    """A number of steps, given directly or, below 1, as a share of all steps."""
    return round(value * steps) if value < 1 else round(value)


class Constant(Schedule):
    """Stays at the peak after warm-up."""

    def build(self, steps: int) -> Factor:
        import jax.numpy as jnp

        return self.warmed(steps, jnp.ones_like)


class LinearDecay(Schedule):
    """Decays linearly."""

    final: Annotated[float, Also("final_lr_frac", "min_lr_ratio", "min_lr_factor"), _RATE] = Field(0.0, ge=0, le=1)
    """Learning rate at the last step, as a share of the peak. 0 is reached one step later, so that the last step changes something."""

    def build(self, steps: int) -> Factor:
        return self.warmed(steps, lambda p: 1 - (1 - self.final) * p, self.final)


class Cosine(Schedule):
    """Decays along half a cosine. Loshchilov and Hutter 2016 (arXiv:1608.03983), without restarts."""

    final: Annotated[
        float,
        Also(
            "final_lr_frac",
            "min_lr_ratio",
            "lr_scheduler.min_lr_factor",
            "min_lr_factor",
            "cosine_learning_rate_final_fraction",
        ),
        _RATE,
    ] = Field(0.1, ge=0, le=1)
    """Learning rate at the last step, as a share of the peak. 0 is reached one step later, so that the last step changes something."""

    def build(self, steps: int) -> Factor:
        import jax.numpy as jnp

        return self.warmed(steps, lambda p: self.final + (1 - self.final) * 0.5 * (1 + jnp.cos(math.pi * p)), self.final)


class WSD(Schedule):
    """Warm-up, stable, decay: stays at the peak, then decays linearly at the end. Hu et al. 2024 (arXiv:2404.06395)."""

    decay: Annotated[
        float,
        Also("warmdown_ratio", "cooldown", "lr_scheduler.decay_ratio", "decay_ratio", "decay_steps", "cooldown_steps"),
    ] = Field(0.2, gt=0)
    """Steps of the decay at the end; below 1, a share of all steps."""
    final: Annotated[float, Also("final_lr_frac", "min_lr_ratio", "min_lr_factor"), _RATE] = Field(0.0, ge=0, le=1)
    """Learning rate at the last step, as a share of the peak. 0 is reached one step later, so that the last step changes something."""

    def build(self, steps: int) -> Factor:
        import jax.numpy as jnp

        left = max(1, span(steps - _count(self.warmup, steps), self.final))
        share = min(1.0, _count(self.decay, steps) / left) or 1 / left
        return self.warmed(steps, lambda p: 1 - (1 - self.final) * jnp.clip((p - (1 - share)) / share, 0, 1), self.final)


SCHEDULES = Registry("schedule", {"constant": Constant, "linear": LinearDecay, "cosine": Cosine, "wsd": WSD})
