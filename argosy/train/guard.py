"""Keeps the effect of a bad step out of the state, inside the compiled step.

The host reads the numbers of a step after the next one was dispatched. So the step itself decides: it compares its loss, and where it
is bad, weights, optimizer state and the other weights that moved stay as they were, bit for bit. What was skipped counts as a step: the
random key and the data go on. Before a stop or a rollback the state halts: it stays that of the last good step, whatever steps were
dispatched after the bad one, until the host has read why.
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
    """The loss is no longer finite, or jumped."""


def begin(settings: GuardSettings) -> dict[str, np.ndarray]:
    """The initial state of the guard: whether it halted; the numbers of skipped steps in a row and in total; the last losses."""
    state = {FLAG: np.zeros((), np.int32)}
    if "skip" in settings.actions:
        state |= {"in_row": np.zeros((), np.int32), SKIPPED: np.zeros((), np.int32)}
    if settings.spike != "off":
        state |= {"losses": np.zeros((settings.window,), np.float32), "seen": np.zeros((), np.int32)}
    return state


@dataclass(frozen=True)
class StepVerdict:
    """The guard's verdict on a step, as scalar arrays, and its next state."""

    kind: Array
    stays: Array
    halted: Array
    kept: dict[str, Array]


def judge_step(before: Mapping[str, Array], loss: Array, norm: Array, settings: GuardSettings) -> StepVerdict:
    """Whether a step with this loss and gradient norm is good. before: what the guard kept."""
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
    """The step `(state, ...) -> state, metrics` with this guard. Metrics: also `guard`, what it found, and `skipped` so far.

    State in the host's memory is taken from the step as it is: the optimizer was told whether it stays (`make_step(stays=)`).
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
    """The loss above which there is a spike; infinite until half a window is known. losses: [window], of which `seen` were written."""
    count = jnp.minimum(seen, settings.window)
    valid = jnp.arange(settings.window) < count

    def median(values: Array) -> Array:
        ranked = jnp.sort(jnp.where(valid, values, jnp.inf))
        return (ranked[jnp.maximum(count - 1, 0) // 2] + ranked[count // 2]) / 2

    middle = median(losses)
    deviation = jnp.maximum(NORMAL * median(jnp.abs(losses - middle)), jnp.maximum(LEAST * jnp.abs(middle), LEAST_NATS))
    return jnp.where(count >= settings.window // 2, middle + settings.deviations * deviation, jnp.inf)


def clear_halt(state: TrainState) -> TrainState:
    """The state of the last good step, which may go on."""
    return replace(state, guard=state.guard | {FLAG: jnp.zeros_like(state.guard[FLAG])})


@dataclass(frozen=True)
class Bad:
    """A bad step.

    step: its number.
    kind: `NONFINITE` or `SPIKE`.
    numbers: its metrics.
    """

    step: int
    kind: int
    numbers: Mapping[str, float]

    @property
    def cause(self) -> str:
        """ "loss is nan", "loss jumped to 9.1"."""
        if self.kind == SPIKE:
            return f"loss jumped to {self.numbers['loss']:.6g}"
        name = next(n for n in ("loss", "grad_norm") if not np.isfinite(self.numbers[n]))
        return f"{name} is {self.numbers[name]}"

    @property
    def other(self) -> str:
        """The number that `what` does not name: "grad_norm 3.1"."""
        name = "loss" if self.cause.startswith("grad_norm") else "grad_norm"
        return f"{name} {self.numbers[name]:.4g}"


class Halted(Exception):
    """The state halted at a bad step. Caught by whoever runs the loop."""

    def __init__(self, bad: Bad):
        super().__init__(bad.cause)
        self.bad = bad


class Watch:
    """Reads what each step found.

    Args:
        skipped: called with each step that was skipped.
    """

    def __init__(self, skipped: Callable[[Bad], None]):
        self.skipped = skipped

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics without what the guard says.

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
