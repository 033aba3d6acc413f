"""What a step does to the state when its numbers are bad."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from argosy.train.guard import GOOD, HALTED, NONFINITE, SPIKE, Bad, begin, clear_halt, guard_step, limit
from argosy.train.guard_settings import GuardSettings
from argosy.train.state import TrainState

NAN, INF = float("nan"), float("inf")


def step(state: TrainState, loss: Any) -> Any:
    """Moves everything by the loss, so that a loss that is not finite spoils everything."""
    params = {"w": state.params["w"] + loss}
    rest = {"moved": state.rest["moved"] * loss, "frozen": state.rest["frozen"]}
    new = TrainState(state.step + 1, params, rest, {"mu": state.optimizer["mu"] - loss}, state.key)
    return new, {"loss": loss, "grad_norm": jnp.abs(loss)}


def after(losses: list[float], **options: Any) -> tuple[list[TrainState], list[int]]:
    """The states before and after each step, and what each found."""
    settings = GuardSettings(**options)
    state = TrainState.start(
        {"w": jnp.ones((2, 3))}, {"moved": jnp.ones(2), "frozen": jnp.ones(2)}, {"mu": jnp.zeros((2, 3))}, 0, begin(settings)
    )
    update, states, verdicts = jax.jit(guard_step(step, settings)), [state], []
    for loss in losses:
        state, metrics = update(state, jnp.float32(loss))
        states.append(state)
        verdicts.append(int(metrics["guard"]))
    return states, verdicts


def weights(state: TrainState) -> list[bytes]:
    return [np.asarray(a).tobytes() for a in jax.tree.leaves((state.params, state.rest, state.optimizer))]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_skipped_step_changes_nothing_but_counts(bad: float):
    states, verdicts = after([0.5, bad, 0.25], nonfinite="skip")
    assert verdicts == [GOOD, NONFINITE, GOOD]
    assert weights(states[2]) == weights(states[1])
    assert [int(s.step) for s in states] == [0, 1, 2, 3]
    without, _ = after([0.5, 0.25])
    assert weights(states[3]) == weights(without[2])
    assert int(states[3].guard["skipped"]) == 1


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_the_state_halts_at_a_bad_step_whatever_follows(action: str):
    states, verdicts = after([0.5, NAN, 0.25, NAN], nonfinite=action)
    assert verdicts == [GOOD, NONFINITE + HALTED, GOOD + HALTED, NONFINITE + HALTED]
    assert all(weights(s) == weights(states[1]) and int(s.step) == 1 for s in states[2:])
    assert int(clear_halt(states[-1]).guard["halted"]) == 0


def test_too_many_skips_in_a_row_halt_and_a_good_step_counts_anew():
    states, verdicts = after([NAN, NAN, 1.0, NAN, NAN, NAN, 1.0], nonfinite="skip", in_row=2)
    assert verdicts == [1, 1, 0, 1, 1, 1 + HALTED, 0 + HALTED]
    assert int(states[-1].step) == 5
    assert int(states[-1].guard["in_row"]) == 2, "that of the last step that counts"


def test_a_spike_is_what_lies_far_above_the_median():
    losses = [2.0, 2.1, 1.9, 2.0, 2.2, 2.1, 9.0, 2.0, 0.1, 2.15]
    states, verdicts = after(losses, spike="skip", window=8)
    assert verdicts == [0, 0, 0, 0, 0, 0, SPIKE, 0, 0, 0], "a loss far below is none"
    assert weights(states[7]) == weights(states[6])
    early, verdicts = after([2.0, 2.1, 1.9, 9.0], spike="skip", window=8)
    assert verdicts == [0, 0, 0, 0], "half a window is not known yet"
    assert weights(early[4]) != weights(early[3])


def test_actions_are_apart():
    _, verdicts = after([2.0, 2.1, 9.0, 2.0, NAN], spike="skip", nonfinite="stop", window=4)
    assert verdicts == [0, 0, SPIKE, 0, NONFINITE + HALTED]


@pytest.mark.parametrize("seen", [0, 3, 4, 7, 8, 100])
def test_the_limit_is_the_median_and_the_median_distance_from_it(seen: int):
    losses = np.random.default_rng(seen).normal(3, 0.2, 8).astype(np.float32)
    seen_losses = losses[: min(seen, 8)]
    expected = INF
    if len(seen_losses) >= 4:
        middle = np.median(seen_losses)
        expected = middle + 6 * 1.4826 * np.median(np.abs(seen_losses - middle))
    bound = limit(jnp.asarray(losses), jnp.int32(seen), GuardSettings(window=8))
    np.testing.assert_allclose(bound, expected, rtol=1e-6)


def test_losses_that_are_all_alike_have_a_deviation_of_a_thousandth():
    bound = limit(jnp.full(8, 2.0), jnp.int32(8), GuardSettings(window=8))
    np.testing.assert_allclose(bound, 2.0 + 6 * 0.002, rtol=1e-6)


def test_losses_of_exactly_zero_have_a_deviation_of_a_millionth():
    """Policy losses are exactly 0 where every answer of a group has the same reward."""
    zeros = jnp.asarray([0.0] * 6 + [0.1, -0.1])
    bound = limit(zeros, jnp.int32(8), GuardSettings(window=8))
    np.testing.assert_allclose(bound, 6e-6, rtol=1e-6)
    _, verdicts = after([0.0] * 4 + [1e-7, 0.5], spike="skip", window=4)
    assert verdicts == [0, 0, 0, 0, 0, SPIKE]


def test_words_that_are_none():
    with pytest.raises(ValidationError):
        GuardSettings(nonfinite="ignore")  # pyright: ignore[reportArgumentType]


def test_a_bad_step_is_told_with_the_number_that_is_not_named():
    of_norm = Bad(5, NONFINITE, {"loss": 3.125, "grad_norm": NAN})
    assert (of_norm.cause, of_norm.other) == ("grad_norm is nan", "loss 3.125")
    of_loss = Bad(5, NONFINITE, {"loss": INF, "grad_norm": NAN})
    assert (of_loss.cause, of_loss.other) == ("loss is inf", "grad_norm nan")
    assert Bad(5, SPIKE, {"loss": 9.1, "grad_norm": 2.0}).other == "grad_norm 2"
