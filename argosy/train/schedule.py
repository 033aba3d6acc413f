"""Learning rate schedules. A schedule gives a factor on the peak learning rate for each step. All begin with a linear warm-up from
0."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from argosy.core.counts import plural
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

    def unfinished(self, steps: int) -> str | None:
        """Returns a warning if the warm-up is longer than the run; otherwise None."""
        warm = _count(self.warmup, steps)
        if warm <= steps:
            return None
        message = f"schedule.warmup={warm} is longer than the run of {plural(steps, 'step')}"
        return f"{message}: the rate ends at {steps / warm:.2g} of optimizer.learning_rate. Below 1, warmup is a share of all steps"

    def warmed(self, steps: int, after: Factor, final: float = 1.0) -> Factor:
        """Makes a schedule of a warm-up followed by `after`.

        Args:
            steps: the number of steps of the run.
            after: (progress) -> the factor. Progress over the steps after the warm-up goes from 0 at the first to 1 at the last.
            final: the last value of `after`. If it is 0, progress reaches 1 one step after the last.
        """
        import jax.numpy as jnp

        warm = _count(self.warmup, steps)
        return self.warmed_up(warm, lambda step: after(jnp.clip((step - warm) / max(1, span(steps - warm, final)), 0, 1)))

    def warmed_up(self, warm: int, after: Factor) -> Factor:
        """Makes a schedule of a warm-up over `warm` steps, followed by `after`, a function of the step."""
        import jax.numpy as jnp

        def factor(step: Any) -> Any:
            step = jnp.asarray(step, jnp.float32)
            return jnp.where(step < warm, (step + 1) / max(1, warm), after(step))

        return factor


def span(steps: int, final: float) -> int:
    """Returns the number of steps from the first step of a decay to the step with the final rate.

    A final rate of 0 would waste the last step, so it comes one step after the last, as in transformers and torchtitan. A linear decay
    over n steps then ends at 1 / n of the peak.

    Args:
        steps: the number of steps of the decay.
        final: the final rate.
    """
    return steps - 1 if final else steps


def _count(value: float, steps: int) -> int:
    """Returns a number of steps. A value below 1 is a share of all steps."""
    return round(value * steps) if value < 1 else round(value)


class Constant(Schedule):
    """Stays at the peak after warm-up."""

    def build(self, steps: int) -> Factor:
        import jax.numpy as jnp

        return self.warmed(steps, jnp.ones_like)


class LinearDecay(Schedule):
    """Decays linearly."""

    final: Annotated[float, Also("final_lr_frac", "min_lr_ratio", "min_lr_factor"), _RATE] = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak. 0 is reached one step after the last, so that the last step still has an
    effect.
    """

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
    """Learning rate at the end, as a share of the peak. 0 is reached one step after the last, so that the last step still has an
    effect.
    """

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
    shape: Annotated[Literal["linear", "sqrt", "cosine"], Also("decay_type", "cooldown_type", "lr_scheduler.decay_type")] = "linear"
    """How it falls. sqrt: 1 - sqrt of the progress, which ended lower than linear in arXiv:2405.18392; cosine: half a cosine."""
    final: Annotated[float, Also("final_lr_frac", "min_lr_ratio", "min_lr_factor"), _RATE] = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak. 0 is reached one step after the last, so that the last step still has an
    effect.
    """

    def build(self, steps: int) -> Factor:
        import jax.numpy as jnp

        remaining = max(1, span(steps - _count(self.warmup, steps), self.final))
        share = min(1.0, _count(self.decay, steps) / remaining) or 1 / remaining
        fallen = {"linear": lambda q: q, "sqrt": jnp.sqrt, "cosine": lambda q: 0.5 * (1 - jnp.cos(math.pi * q))}[self.shape]

        def after(p: Any) -> Any:
            return 1 - (1 - self.final) * fallen(jnp.clip((p - (1 - share)) / share, 0, 1))

        return self.warmed(steps, after, self.final)


class Polynomial(Schedule):
    """Decays as a power of what is left of the run. Power 1 is linear, 2 the decay of many vision models."""

    power: Annotated[float, Also("lr_power", "poly_power")] = Field(2.0, gt=0)
    """Power of the share of steps that are left."""
    final: Annotated[float, Also("final_lr_frac", "min_lr_ratio", "min_lr_factor"), _RATE] = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak. 0 is reached one step after the last, so that the last step still has an
    effect.
    """

    def build(self, steps: int) -> Factor:
        return self.warmed(steps, lambda p: self.final + (1 - self.final) * (1 - p) ** self.power, self.final)


class InverseSquareRoot(Schedule):
    """Decays as one over the square root of the step, whatever the number of steps (arXiv:1706.03762, arXiv:2106.04560)."""

    timescale: Annotated[float | None, Also("lr_timescale", "inverse_sqrt_timescale")] = Field(None, gt=0)
    """Steps t after which the rate is 1 / sqrt(2) of its peak: sqrt(t / (t + steps since warm-up)). None: the steps of warm-up, or
    10,000 without one."""

    def build(self, steps: int) -> Factor:
        import jax.numpy as jnp

        warm = _count(self.warmup, steps)
        scale = self.timescale or warm or 10_000
        return self.warmed_up(warm, lambda step: jnp.sqrt(scale / (scale + jnp.maximum(step - warm, 0))))


class Restarts(Schedule):
    """Decays along half a cosine several times, each time from the peak. Loshchilov and Hutter 2016 (arXiv:1608.03983)."""

    cycles: Annotated[int, Also("num_cycles", "restarts", "cosine_cycles")] = Field(4, gt=0)
    """Number of decays."""
    growth: Annotated[float, Also("T_mult", "cycle_mult")] = Field(1.0, gt=0)
    """Length of a decay as a multiple of the one before."""
    shrink: Annotated[float, Also("gamma", "restart_decay")] = Field(1.0, gt=0, le=1)
    """Height of a decay as a multiple of the one before."""
    final: Annotated[float, Also("final_lr_frac", "min_lr_ratio", "min_lr_factor"), _RATE] = Field(0.0, ge=0, le=1)
    """Learning rate at the end of each decay, as a share of the peak."""

    def build(self, steps: int) -> Factor:
        import jax.numpy as jnp

        lengths = [self.growth**i for i in range(self.cycles)]
        ends = [sum(lengths[: i + 1]) / sum(lengths) for i in range(self.cycles)]

        def after(p: Any) -> Any:
            cycle = sum((p >= end).astype(jnp.int32) for end in ends[:-1]) if self.cycles > 1 else jnp.zeros((), jnp.int32)
            start = jnp.asarray([0.0, *ends[:-1]], jnp.float32)[cycle]
            q = (p - start) / (jnp.asarray(ends, jnp.float32)[cycle] - start)
            height = jnp.asarray([self.shrink**i for i in range(self.cycles)], jnp.float32)[cycle]
            return self.final + (height - self.final) * 0.5 * (1 + jnp.cos(math.pi * jnp.clip(q, 0, 1)))

        return self.warmed(steps, after, self.final)


class SchedulePoint(Settings):
    """A step and the learning rate from there on."""

    step: float = Field(ge=0)
    """Step, counted from 0; below 1, a share of all steps."""
    factor: float = Field(ge=0)
    """Learning rate, as a share of the peak."""


class Piecewise(Schedule):
    """Takes the learning rates of given steps, as steps or as straight lines."""

    points: Annotated[list[SchedulePoint], Also("milestones", "boundaries", "boundaries_and_scales", "lr_steps")] = Field(
        default_factory=list
    )
    """Steps and the share of the peak from there on, in ascending order: `schedule.points='[{step: 0.5, factor: 0.1}]'`. Before the
    first it is the peak."""
    between: Annotated[Literal["constant", "linear"], Also("interpolate_type")] = "constant"
    """The rate between two points. constant: that of the first of them; linear: on the line between them."""

    @model_validator(mode="after")
    def _ascends(self) -> "Piecewise":
        at = [point.step for point in self.points]
        # Shares and counts cannot be compared before the number of steps is known.
        if any(a >= b for a, b in pairwise(at) if (a < 1) == (b < 1)):
            raise ValueError("points are not in ascending order of their steps")
        return self

    def build(self, steps: int) -> Factor:
        import jax.numpy as jnp

        warm = _count(self.warmup, steps)
        at = [warm, *(_count(point.step, steps) for point in self.points)]
        values = [1.0, *(point.factor for point in self.points)]

        def after(step: Any) -> Any:
            if self.between == "linear":
                return jnp.interp(step, jnp.asarray(at, jnp.float32), jnp.asarray(values, jnp.float32))
            passed = sum((step >= boundary).astype(jnp.int32) for boundary in at[1:]) if self.points else jnp.zeros((), jnp.int32)
            return jnp.asarray(values, jnp.float32)[passed]

        return self.warmed_up(warm, after)


SCHEDULES = Registry(
    "schedule",
    {
        "constant": Constant,
        "linear": LinearDecay,
        "cosine": Cosine,
        "wsd": WSD,
        "polynomial": Polynomial,
        "inverse_sqrt": InverseSquareRoot,
        "restarts": Restarts,
        "piecewise": Piecewise,
    },
    files=True,
)
SCHEDULES.add_installed("argosy.schedules")
