"""Lookahead: slow weights that follow the optimizer's fast ones. Zhang et al. 2019 (arXiv:1907.08610, algorithm 1).

    every k steps:   slow <- slow + α (fast - slow);   fast <- slow

The state of the optimizer is not reset then, as in the paper's experiments. Evaluations use the fast weights.
"""

from typing import Annotated, Any, NamedTuple

from pydantic import Field

from argosy.core.settings import Also, Settings


class LookaheadSettings(Settings):
    """Slow weights that follow the optimizer's every few steps (arXiv:1907.08610). They take as much memory as the weights."""

    every: Annotated[int, Also("lookahead_k", "sync_period", "la_steps")] = Field(0, ge=0)
    """Steps of the optimizer between two moves of the slow weights; the paper takes 5 or 10. 0: no slow weights."""
    rate: Annotated[float, Also("lookahead_alpha", "slow_step_size", "la_alpha")] = Field(0.5, gt=0, le=1)
    """Share of the way to the fast weights that the slow ones move."""


class LookaheadState(NamedTuple):
    """The state of Lookahead.

    count: the number of updates.
    slow: the slow weights.
    rule: the state of the optimizer.
    """

    count: Any
    slow: Any
    rule: Any


def with_slow_weights(rule: Any, settings: LookaheadSettings) -> Any:
    """Adds slow weights to a rule. Without `lookahead.every`, returns the rule unchanged."""
    if not settings.every:
        return rule
    import jax
    import jax.numpy as jnp
    import optax

    def init(params: Any) -> LookaheadState:
        return LookaheadState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params), rule.init(params))

    def update(updates: Any, state: Any, params: Any = None, **others: Any) -> Any:
        done: Any = optax.with_extra_args_support(rule).update(updates, state.rule, params, **others)
        new_updates: dict[str, Any] = done[0]
        count = state.count + 1
        due = count % settings.every == 0
        slow = {a: jnp.where(due, s + settings.rate * (params[a] + new_updates[a] - s), s) for a, s in state.slow.items()}
        new_updates = {a: jnp.where(due, slow[a] - params[a], u) for a, u in new_updates.items()}
        return new_updates, LookaheadState(count, slow, done[1])

    return optax.GradientTransformationExtraArgs(init, update)
