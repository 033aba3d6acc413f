"""`SamplingPlan`: every sampler as a table of numbers, and the one loop that follows it.

All samplers of the field are linear in what they have seen. With x the sample at which the network was evaluated, `last` an earlier one
that some of them keep, and h_0, h_1, ... what was predicted at this evaluation and at those before,

    h_0 = p x + q prediction                  clipped, where a plan says so
    last' = keep . (x, last, raw, h_0, h_1, ...)
    x' = move . (x, last, raw, h_0, h_1, ...) + spread e           raw: h_0 before it was clipped; e: fresh noise

so a sampler computes p, q, keep, move and spread on the host, in double precision, and one program runs all of them. Rows of a plan are
evaluations of the network: a method of second order has two a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Places in the list that `keep` and `move` weigh; earlier predictions follow.
X, LAST, RAW, NEW = range(4)
# Columns of a plan that are not by evaluation.
WHOLE = ("begin", "scale")


@dataclass
class SamplerStep:
    """One row of a plan, on the host.

    timestep: what the network is told.
    level: alpha and sigma after it.
    read: p and q.
    keep, move: weight by place (`X`, `LAST`, `RAW`, `NEW`, `NEW + 1` for the prediction before, ...).
    spread: weight of fresh noise.
    """

    timestep: float
    level: tuple[float, float]
    read: tuple[float, float]
    move: dict[int, float]
    keep: dict[int, float] = field(default_factory=lambda: {X: 1.0})
    spread: float = 0.0


class SamplingPlan(NamedTuple):
    """The table of a sampler for a number of steps. S evaluations, K places.

    timestep: [S] float32.
    read: [S 2] p and q.
    keep, move: [S K].
    spread: [S].
    level: [S 2] alpha and sigma after each evaluation.
    begin: alpha and sigma of the first sample.
    scale: factors on the initial noise and on the result.
    clip: [S] the largest value of a predicted image; infinite where nothing is clipped.
    control: [S C] above 0 where each of the ControlNets acts; None: all act at each evaluation.
    """

    timestep: Any
    read: Any
    keep: Any
    move: Any
    spread: Any
    level: Any
    begin: Any
    scale: Any
    clip: Any
    control: Any = None

    @property
    def evaluations(self) -> int:
        """How often the network is evaluated."""
        return self.timestep.shape[0]


def plan_of(
    rows: Sequence[SamplerStep],
    begin: tuple[float, float],
    scale: tuple[float, float] = (1.0, 1.0),
    clip: float | None = None,
) -> SamplingPlan:
    """The table of these rows."""
    places = 1 + max(max([*row.move, *row.keep, NEW]) for row in rows)

    def dense(weights: dict[int, float]) -> list[float]:
        return [weights.get(place, 0.0) for place in range(places)]

    columns: tuple[Any, ...] = (
        [row.timestep for row in rows],
        [row.read for row in rows],
        [dense(row.keep) for row in rows],
        [dense(row.move) for row in rows],
        [row.spread for row in rows],
        [row.level for row in rows],
        begin,
        scale,
        [np.inf if clip is None else clip] * len(rows),
    )
    return SamplingPlan(*(np.asarray(column, np.float32) for column in columns))


class SamplerState(NamedTuple):
    """Between two evaluations.

    x: the sample [B H W C], of videos [B F H W C]; so are the others.
    last: an earlier one that the sampler kept [B H W C].
    predicted: what was predicted last [B H W C]: the image, or with pndm the noise.
    past: earlier predictions, the newest first [K - 4 B H W C].
    memory: what the network keeps between evaluations (`infer.denoise.step_cache`). None: nothing.
    """

    x: Array
    last: Array
    predicted: Array
    past: Array
    memory: Any = None


# (sample, timestep, alpha and sigma after the step) -> prediction. With a memory, which comes last: -> prediction, memory. Where the
# plan says when a ControlNet acts, that is the argument `control`.
Predict = Callable[..., Any]


def initial_state(
    plan: SamplingPlan, noise: Float[Array, "B *F H W C"], image: Float[Array, "B *F H W C"] | None = None
) -> SamplerState:
    """The first state, from noise alone, or from an image with the noise of the plan's first level on it."""
    x = noise * plan.scale[0] if image is None else plan.begin[0] * image + plan.begin[1] * noise
    past = plan.move.shape[-1] - NEW - 1
    nothing = jnp.zeros_like(x)
    return SamplerState(x, nothing, nothing, jnp.zeros((past, *x.shape), x.dtype))


def advance(predict: Predict, state: SamplerState, row: SamplingPlan, fresh: Array | None) -> SamplerState:
    """One evaluation. row: one row of the plan's columns; fresh: noise like x, where the sampler spreads any."""
    x, last, _, past, memory = state
    more: Any = {} if row.control is None else {"control": row.control}
    if memory is None:
        prediction = predict(x, row.timestep, row.level, **more)
    else:
        prediction, memory = predict(x, row.timestep, row.level, memory, **more)
    raw = row.read[0] * x + row.read[1] * prediction
    new = jnp.clip(raw, -row.clip, row.clip)
    seen = jnp.stack([x, last, raw, new, *past])
    # A weight of 0 leaves out what may be infinite or no number.
    predicted, moved = (_weighed(weights, seen) for weights in (row.keep, row.move))
    if fresh is not None:
        moved = moved + row.spread * fresh
    return SamplerState(moved, predicted, new, jnp.concatenate([new[None], past])[: len(past)], memory)


def _weighed(weights: Array, seen: Array) -> Array:
    wide = weights.reshape(-1, *[1] * (seen.ndim - 1))
    return jnp.sum(jnp.where(wide == 0, 0, wide * seen), 0)


def row_at(plan: SamplingPlan, i: Any) -> SamplingPlan:
    """Row i of a plan's columns."""
    return SamplingPlan(*(None if name in WHOLE or column is None else column[i] for name, column in plan._asdict().items()))


def pad_plan(plan: SamplingPlan) -> SamplingPlan:
    """The same plan with rows after its end that nothing reads: one program serves every number of steps up to a power of two."""
    count = max(16, 1 << (plan.evaluations - 1).bit_length())
    more = count - plan.evaluations

    def longer(name: str, column: Any) -> Any:
        return column if name in WHOLE or column is None else np.pad(column, [(0, more)] + [(0, 0)] * (column.ndim - 1))

    return SamplingPlan(*(longer(name, column) for name, column in plan._asdict().items()))


def sample(
    predict: Predict,
    plan: SamplingPlan,
    state: SamplerState,
    keys: Array | None = None,
    fixed: "FixedParts | None" = None,
    evaluations: Any = None,
) -> Float[Array, "B *F H W C"]:
    """The result of a whole plan, as one loop of the compiled program. Arguments are those of `last_state`."""
    return last_state(predict, plan, state, keys, fixed, evaluations).x * plan.scale[1]


def last_state(
    predict: Predict,
    plan: SamplingPlan,
    state: SamplerState,
    keys: Array | None = None,
    fixed: "FixedParts | None" = None,
    evaluations: Any = None,
) -> SamplerState:
    """The state after a whole plan, as one loop of the compiled program.

    Args:
        keys: [B] random keys of the images, for samplers that spread noise: each image's noise depends on its key alone.
        fixed: parts of the image that stay as they are (inpainting).
        evaluations: how many rows of the plan count; all by default.
    """
    table = jax.tree.map(jnp.asarray, plan)

    def body(i: Array, state: SamplerState) -> SamplerState:
        row = row_at(table, i)
        fresh = None if keys is None else fresh_noise(keys, i, state.x)
        state = advance(predict, state, row, fresh)
        return state if fixed is None else state._replace(x=fixed.apply(state.x, row.level))

    count = plan.evaluations if evaluations is None else evaluations
    return jax.lax.fori_loop(0, count, body, state)


def fresh_noise(keys: Array, index: Array | int, like: Array) -> Array:
    """Normal noise [B H W C] of evaluation `index`, an image's from its own key."""
    return jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, index), like.shape[1:], like.dtype))(keys)


class FixedParts(NamedTuple):
    """Parts of an image that are not drawn anew.

    mask: [B H W 1] 1 where the image is drawn, 0 where it stays.
    image: [B H W C] the image that stays.
    noise: [B H W C] its noise on the way.
    """

    mask: Array
    image: Array
    noise: Array

    def apply(self, x: Array, level: Array) -> Array:
        """x with the fixed parts at alpha and sigma of this level."""
        return self.mask * x + (1 - self.mask) * (level[0] * self.image + level[1] * self.noise)
