"""Keeps the effect of a bad step (a loss or gradient that is not finite, or a loss spike) out of the training state.

The host reads the metrics of a step only after it has dispatched the next one. So the compiled step itself decides. If its loss is bad,
all weights and the optimizer state stay as they were, bit for bit. A skipped update still counts as a step: the random key and the data
advance. Before a stop or a rollback the state halts. It then stays that of the last good step, whatever steps were dispatched after the
bad one, until the host has read the reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from argosy.core.errors import Final
from argosy.train.guard_settings import GuardSettings
from argosy.train.state import TrainState

# The metric in which a step says what it found: one of these, plus HALTED if the state stays as it is from then on.
VERDICT, SKIPPED = "guard", "skipped"
GOOD, NONFINITE, SPIKE = 0, 1, 2
HALTED = 4
# Of what `begin` gives, that which no checkpoint holds.
FLAG = "halted"
# The standard deviation of a normal distribution as a multiple of its median distance from the median.
NORMAL = 1.4826
# The least deviation, as a share of the median; and in nats, for losses around 0.
LEAST, LEAST_NATS = 1e-3, 1e-6


class Diverged(Final):
    """The loss is no longer finite, or has jumped."""


def begin(settings: GuardSettings) -> dict[str, np.ndarray]:
    """Makes the initial state of the guard: whether the state halted, and as far as the settings need them, the numbers of skipped
    steps in a row and in total, and the last losses."""
    state = {FLAG: np.zeros((), np.int32)}
    if "skip" in settings.actions:
        state |= {"in_row": np.zeros((), np.int32), SKIPPED: np.zeros((), np.int32)}
    if settings.spike != "off":
        state |= {"losses": np.zeros((settings.window,), np.float32), "seen": np.zeros((), np.int32)}
    return state


@dataclass(frozen=True)
class StepVerdict:
    """The guard's verdict on a step.

    kind: whether the step is good, not finite or a spike (`GOOD`, `NONFINITE`, `SPIKE`); a scalar array.
    stays: whether the training state stays as it was; a scalar array.
    halted: whether the training state has halted; a scalar array.
    kept: the next state of the guard.
    """

    kind: Array
    stays: Array
    halted: Array
    kept: dict[str, Array]


def judge_step(before: Mapping[str, Array], loss: Array, norm: Array, settings: GuardSettings) -> StepVerdict:
    """Judges a step by its loss and the norm of its gradient.

    Args:
        before: the state of the guard before the step.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    spike = finite & (loss > limit(before["losses"], before["seen"], settings)) if settings.spike != "off" else jnp.zeros((), bool)
    kind = jnp.where(finite, jnp.where(spike, SPIKE, GOOD), NONFINITE).astype(jnp.int32)
    bad = kind != GOOD
    halts = (kind == NONFINITE) & (settings.nonfinite != "skip") | (kind == SPIKE) & (settings.spike != "skip")
    state: dict[str, Array] = {}
    if "skip" in settings.actions:
        state["in_row"] = jnp.where(bad, before["in_row"] + 1, 0)
        state[SKIPPED] = before[SKIPPED] + bad.astype(jnp.int32)
        halts = halts | bad & (state["in_row"] > settings.in_row)
    if settings.spike != "off":
        pushed = before["losses"].at[before["seen"] % settings.window].set(loss.astype(jnp.float32))
        state["losses"] = jnp.where(finite, pushed, before["losses"])
        state["seen"] = before["seen"] + finite.astype(jnp.int32)
    halted = (before[FLAG] != 0) | halts
    state = {name: jnp.where(halted, before[name], value) for name, value in state.items()} | {FLAG: halted.astype(jnp.int32)}
    return StepVerdict(kind, bad | (before[FLAG] != 0), halted, state)


def guard_step(step: Callable[..., Any], settings: GuardSettings) -> Callable[..., Any]:
    """Returns the step `(state, ...) -> state, metrics` with a guard. It has two more metrics: `guard`, the verdict, and `skipped`, the
    number of skipped steps so far.

    The guard does not restore arrays in the host's memory. There the optimizer itself leaves a bad step out (`make_step(stays=)`).
    """

    def update(state: TrainState, *args: Any) -> tuple[TrainState, dict[str, Array]]:
        new, metrics = step(state, *args)
        verdict = judge_step(state.guard, metrics["loss"], metrics["grad_norm"], settings)

        def choose(old: Array, now: Array) -> Array:
            on_host = jax.typeof(now).memory_space == jax.memory.Space.Host
            return now if old is now or on_host else jnp.where(verdict.stays, old, now)

        def choose_tree(old: Any, now: Any) -> Any:
            return jax.tree.map(choose, old, now)

        out = TrainState(
            jnp.where(verdict.halted, state.step, new.step),
            choose_tree(state.params, new.params),
            choose_tree(state.rest, new.rest),
            choose_tree(state.optimizer, new.optimizer),
            state.key,
            verdict.kept,
            choose_tree(state.ema, new.ema),
        )
        guard_metrics = {VERDICT: verdict.kind + HALTED * verdict.halted.astype(jnp.int32)}
        return out, metrics | guard_metrics | ({SKIPPED: verdict.kept[SKIPPED]} if SKIPPED in verdict.kept else {})

    return update


def limit(losses: Array, seen: Array, settings: GuardSettings) -> Array:
    """Computes the loss above which a step is a spike. It is infinite until half a window of losses is known.

    Args:
        losses: [window], the last losses, as a ring buffer.
        seen: the number of losses that were written so far.
    """
    count = jnp.minimum(seen, settings.window)
    valid = jnp.arange(settings.window) < count

    def median(values: Array) -> Array:
        ranked = jnp.sort(jnp.where(valid, values, jnp.inf))
        return (ranked[jnp.maximum(count - 1, 0) // 2] + ranked[count // 2]) / 2

    middle = median(losses)
    deviation = jnp.maximum(NORMAL * median(jnp.abs(losses - middle)), jnp.maximum(LEAST * jnp.abs(middle), LEAST_NATS))
    return jnp.where(count >= settings.window // 2, middle + settings.deviations * deviation, jnp.inf)


def clear_halt(state: TrainState) -> TrainState:
    """Returns the halted state without its halt, so that training may continue from the last good step."""
    return replace(state, guard=state.guard | {FLAG: jnp.zeros_like(state.guard[FLAG])})


@dataclass(frozen=True)
class Bad:
    """A bad step.

    step: the number of the step.
    kind: `NONFINITE` or `SPIKE`.
    numbers: the loss and the norm of the gradient, by name.
    """

    step: int
    kind: int
    numbers: Mapping[str, float]

    @property
    def cause(self) -> str:
        """The reason in words, such as "loss is nan" or "loss jumped to 9.1"."""
        if self.kind == SPIKE:
            return f"loss jumped to {self.numbers['loss']:.6g}"
        name = next(n for n in ("loss", "grad_norm") if not np.isfinite(self.numbers[n]))
        return f"{name} is {self.numbers[name]}"

    @property
    def other(self) -> str:
        """The number that `cause` does not name, such as "grad_norm 3.1"."""
        name = "loss" if self.cause.startswith("grad_norm") else "grad_norm"
        return f"{name} {self.numbers[name]:.4g}"


class Halted(Exception):
    """The state halted at a bad step. The caller of the training loop catches this."""

    def __init__(self, bad: Bad):
        super().__init__(bad.cause)
        self.bad = bad


class Watch:
    """Reads the guard's verdict from the metrics of each step.

    Args:
        skipped: called with each step that was skipped.
    """

    def __init__(self, skipped: Callable[[Bad], None]):
        self.skipped = skipped

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the metrics of a step without the guard's verdict.

        Raises:
            Halted: the state halted at this step.
        """
        rest = dict(metrics)
        verdict = int(np.asarray(rest.pop(VERDICT)))
        if verdict == GOOD:
            return rest
        bad = Bad(step, verdict % HALTED, {name: float(np.asarray(rest[name])) for name in ("loss", "grad_norm")})
        if verdict >= HALTED:
            raise Halted(bad)
        self.skipped(bad)
        return rest
