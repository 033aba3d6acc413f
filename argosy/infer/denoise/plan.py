"""`SamplingPlan`: every sampler as a table of coefficients, and the one loop that applies it.

All common samplers are linear in their inputs. Let x be the sample at which the network was evaluated, `last` an earlier sample that
some samplers keep, and h_0, h_1, ... the predictions at this evaluation and at those before. Then

    h_0 = p x + q prediction                  clipped, if the plan says so
    last' = keep . (x, last, raw, h_0, h_1, ...)
    x' = move . (x, last, raw, h_0, h_1, ...) + spread e           raw: h_0 before it was clipped; e: fresh noise

A sampler computes p, q, keep, move and spread on the host, in double precision, and one program runs all samplers. The rows of a plan
are evaluations of the network; a method of second order has two for each step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Indices in the list of arrays that `keep` and `move` weigh. Earlier predictions follow `NEW`.
X, LAST, RAW, NEW = range(4)
# Columns of a plan without an axis of evaluations.
WHOLE = ("begin", "scale")


@dataclass
class SamplerStep:
    """One row of a plan, on the host.

    timestep: the timestep that the network gets as input.
    level: alpha and sigma after the evaluation.
    read: p and q.
    keep, move: weights by index (`X`, `LAST`, `RAW`, `NEW`, `NEW + 1` for the prediction before, ...); 0 for others.
    spread: the weight of fresh noise.
    """

    timestep: float
    level: tuple[float, float]
    read: tuple[float, float]
    move: dict[int, float]
    keep: dict[int, float] = field(default_factory=lambda: {X: 1.0})
    spread: float = 0.0


class SamplingPlan(NamedTuple):
    """The coefficients of a sampler for a number of steps. It has S evaluations, and weighs K arrays.

    timestep: [S] the timestep that the network gets as input.
    read: [S 2] p and q.
    keep, move: [S K] weights of x, last, raw, h_0, h_1, ...
    spread: [S] the weight of fresh noise.
    level: [S 2] alpha and sigma after each evaluation.
    begin: [2] alpha and sigma of the first sample.
    scale: [2] factors on the initial noise and on the result.
    clip: [S] the largest absolute value of a prediction; infinite: not clipped.
    control: [S C] above 0 where each of the C ControlNets acts; None: all act at every evaluation.
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
        """The number of evaluations of the network."""
        return self.timestep.shape[0]


def plan_of(
    rows: Sequence[SamplerStep],
    begin: tuple[float, float],
    scale: tuple[float, float] = (1.0, 1.0),
    clip: float | None = None,
) -> SamplingPlan:
    """Builds the plan of these rows. `begin`, `scale` and `clip` are as in `SamplingPlan`; clip=None: not clipped."""
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
    """The state of a sampler between two evaluations. For videos, arrays have an axis F after B.

    x: [B H W C] the sample.
    last: [B H W C] an earlier sample that the sampler keeps.
    predicted: [B H W C] the last prediction: the image, or with pndm the noise.
    past: [K - 4 B H W C] earlier predictions, the newest first.
    memory: the state of step caching (`infer.denoise.step_cache`); None: no step caching.
    """

    x: Array
    last: Array
    predicted: Array
    past: Array
    memory: Any = None


# (sample, timestep, level after the step: alpha and sigma) -> prediction. With step caching: (..., memory) -> (prediction, memory). If
# the plan has a column `control`, its row is the argument `control`.
Predict = Callable[..., Any]


def initial_state(
    plan: SamplingPlan, noise: Float[Array, "B *F H W C"], image: Float[Array, "B *F H W C"] | None = None
) -> SamplerState:
    """The state before the first evaluation: noise alone, or an image mixed with noise at the plan's first level."""
    x = noise * plan.scale[0] if image is None else plan.begin[0] * image + plan.begin[1] * noise
    past = plan.move.shape[-1] - NEW - 1
    nothing = jnp.zeros_like(x)
    return SamplerState(x, nothing, nothing, jnp.zeros((past, *x.shape), x.dtype))


def advance(predict: Predict, state: SamplerState, row: SamplingPlan, fresh: Array | None) -> SamplerState:
    """Evaluates the network once. Returns the next state.

    Args:
        row: one row of the plan (`row_at`).
        fresh: fresh noise with the shape of x; None: the sampler adds none.
    """
    x, last, _, past, memory = state
    more: Any = {} if row.control is None else {"control": row.control}
    if memory is None:
        prediction = predict(x, row.timestep, row.level, **more)
    else:
        prediction, memory = predict(x, row.timestep, row.level, memory, **more)
    raw = row.read[0] * x + row.read[1] * prediction
    new = jnp.clip(raw, -row.clip, row.clip)
    seen = jnp.stack([x, last, raw, new, *past])
    # Arrays with weight 0 are left out, because they may be infinite or NaN.
    predicted, moved = (_weighed(weights, seen) for weights in (row.keep, row.move))
    if fresh is not None:
        moved = moved + row.spread * fresh
    return SamplerState(moved, predicted, new, jnp.concatenate([new[None], past])[: len(past)], memory)


def _weighed(weights: Array, seen: Array) -> Array:
    wide = weights.reshape(-1, *[1] * (seen.ndim - 1))
    return jnp.sum(jnp.where(wide == 0, 0, wide * seen), 0)


def row_at(plan: SamplingPlan, i: Any) -> SamplingPlan:
    """Row i of a plan. Columns without an axis of evaluations become None."""
    return SamplingPlan(*(None if name in WHOLE or column is None else column[i] for name, column in plan._asdict().items()))


def pad_plan(plan: SamplingPlan) -> SamplingPlan:
    """Pads a plan to a power of two of rows, at least 16, so that one program serves several numbers of steps. Added rows are not
    run."""
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
    """Runs a whole plan as one loop of the compiled program. Returns the result; arguments are those of `last_state`."""
    return last_state(predict, plan, state, keys, fixed, evaluations).x * plan.scale[1]


def last_state(
    predict: Predict,
    plan: SamplingPlan,
    state: SamplerState,
    keys: Array | None = None,
    fixed: "FixedParts | None" = None,
    evaluations: Any = None,
) -> SamplerState:
    """Runs a whole plan as one loop of the compiled program. Returns the last state.

    Args:
        predict: evaluates the network.
        state: the state before the first evaluation.
        keys: [B] random keys of the images, for samplers that add fresh noise; None: the sampler adds none. The noise of each image
            depends only on its key.
        fixed: the parts of images that are not redrawn (inpainting); None: all is drawn.
        evaluations: number of rows of the plan to run; None: all.
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
    """Standard normal noise with the shape of `like` [B H W C] for evaluation `index`. Each image's noise is drawn from its own key."""
    return jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, index), like.shape[1:], like.dtype))(keys)


class FixedParts(NamedTuple):
    """The parts of images that are not redrawn (inpainting).

    mask: [B H W 1] 1 where the image is drawn, 0 where it stays.
    image: [B H W C] the latents of the image that stays.
    noise: [B H W C] the noise that is mixed with it at each level.
    """

    mask: Array
    image: Array
    noise: Array

    def apply(self, x: Array, level: Array) -> Array:
        """Replaces the fixed parts of x by the image at this noise level (alpha and sigma)."""
        return self.mask * x + (1 - self.mask) * (level[0] * self.image + level[1] * self.noise)
