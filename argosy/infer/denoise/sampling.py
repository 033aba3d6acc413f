"""Latents of a batch of images, by the programs that are compiled for its size.

Programs are for a batch size (a power of two) and an image size; one serves any number of steps, any seed and any scale of guidance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from argosy.core.progress import Say, telling
from argosy.infer.denoise.guidance import Guidance
from argosy.infer.denoise.plan import (
    FixedParts,
    Predict,
    SamplerState,
    SamplingPlan,
    advance,
    fresh_noise,
    initial_state,
    padded,
    row_at,
    sample,
)
from argosy.models.diffusion.base import Conditions
from argosy.models.diffusion.noise import STEPS
from argosy.models.parts.weight import merge


@dataclass(frozen=True)
class Drawing:
    """One batch of images to draw, of equal size and plan.

    plan: of the sampler.
    seeds: of each image, and its number among those of its prompt.
    scale: [B] of guidance.
    conditions, null: of the prompts, and of what guidance leads away from (None: no guidance).
    shape: height, width and channels of the latents.
    image, mask: to begin from, [B H W C] latents, and where they may change [B H W 1] (None: everywhere).
    noise: [B H W C] the first noise, in place of that of the seeds.
    """

    plan: SamplingPlan
    seeds: Sequence[tuple[int, int]]
    scale: Any
    conditions: Conditions
    null: Conditions | None
    shape: tuple[int, int, int]
    image: Any = None
    mask: Any = None
    noise: Any = None

    def __len__(self) -> int:
        return len(self.seeds)


class SamplingRun:
    """A batch on its way, step by step or at once.

    Args:
        graph, leaves: of the denoiser's module (`models.parts.weight.split`).
        drawing: the batch, of the size of a program (`padded_drawing`).
        guidance: how predictions with and without prompt become one.
        say: called with what is being compiled, if that takes longer than a second.
    """

    def __init__(self, graph: Any, leaves: Any, drawing: Drawing, guidance: Guidance, say: Say | None = None):
        self.drawing, self.evaluations, self._say = drawing, drawing.plan.evaluations, say
        self._programs = _programs(graph, guidance, drawing.null is not None)
        keys = jnp.stack([jax.random.fold_in(jax.random.key(seed), i) for seed, i in drawing.seeds])
        noise = first_noise(keys, drawing.shape) if drawing.noise is None else jnp.asarray(drawing.noise)
        image = None if drawing.image is None else jnp.asarray(drawing.image)
        fixed = None if drawing.mask is None else FixedParts(jnp.asarray(drawing.mask), cast(Any, image), noise)
        self._state = initial_state(drawing.plan, noise, image)
        fresh = keys if np.any(drawing.plan.spread) else None
        self._given = (leaves, drawing.conditions, drawing.null, jnp.asarray(drawing.scale), fresh, fixed)

    def at_once(self) -> Array:
        """The latents after all evaluations."""
        plan = padded(self.drawing.plan)
        with telling(self._say, "compiling the sampler"):
            return self._programs.whole(*self._given, plan, self._state, self.evaluations)

    def step(self, i: int) -> None:
        """Evaluation i."""
        with telling(self._say if i == 0 else None, "compiling the sampler"):
            row = row_at(self.drawing.plan, i)
            self._state = self._programs.step(*self._given, row, self._state, np.int32(i))

    def predicted(self) -> Array:
        """The latents of the images as they were predicted last."""
        return self._state.predicted

    def latents(self) -> Array:
        """The latents, after the last evaluation, or on their way."""
        return self._state.x * self.drawing.plan.scale[1]


@dataclass(frozen=True)
class _Programs:
    whole: Callable[..., Array]
    step: Callable[..., SamplerState]


def step_conditions(config: Any, conditions: Conditions, timestep: Array, level: Array, rows: int) -> Conditions:
    """Conditions with the interval of a step, for models that read one: flows, whose sigma is the time."""
    if "interval" not in config.conditions:
        return conditions
    return conditions._replace(interval=jnp.full(rows, timestep - STEPS * level[1], jnp.float32))


@lru_cache(maxsize=16)
def _programs(graph: Any, guidance: Guidance, guided: bool) -> _Programs:
    def predictor(leaves: Any, conditions: Conditions, null: Conditions | None, scale: Array) -> Predict:
        model = merge(graph, leaves)

        def predict(x: Array, timestep: Array, level: Array) -> Array:
            times = jnp.full(len(x), timestep, jnp.float32)
            own = step_conditions(model.config, conditions, timestep, level, len(x))
            if null is None:
                return model(x, times, own).astype(jnp.float32)
            away = step_conditions(model.config, null, timestep, level, len(x))
            both = Conditions(*jax.tree.map(lambda a, b: jnp.concatenate([a, b]), tuple(own), tuple(away)))
            out = model(jnp.concatenate([x, x]), jnp.concatenate([times, times]), both).astype(jnp.float32)
            return guidance.apply(out[: len(x)], out[len(x) :], scale, timestep)

        return predict

    @jax.jit
    def whole(
        leaves: Any, conditions: Any, null: Any, scale: Any, keys: Any, fixed: Any, plan: SamplingPlan, state: Any, evaluations: Any
    ) -> Array:
        return sample(predictor(leaves, conditions, null, scale), plan, state, keys, fixed, evaluations)

    @partial(jax.jit, donate_argnums=7)
    def step(
        leaves: Any, conditions: Any, null: Any, scale: Any, keys: Any, fixed: Any, row: SamplingPlan, state: Any, i: Any
    ) -> SamplerState:
        fresh = None if keys is None else fresh_noise(keys, i, state.x)
        state = advance(predictor(leaves, conditions, null, scale), state, row, fresh)
        return state if fixed is None else state._replace(x=fixed.apply(state.x, row.level))

    return _Programs(whole, step)


@partial(jax.jit, static_argnums=1)
def first_noise(keys: Key[Array, "B"], shape: tuple[int, int, int]) -> Float[Array, "B H W C"]:
    """The noise that images begin from, [H W C] each from its own key."""
    return jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(keys)


def padded_drawing(drawing: Drawing) -> Drawing:
    """The batch with its last image repeated up to a power of two, so that few programs are compiled."""
    more = (1 << (len(drawing) - 1).bit_length()) - len(drawing)
    if not more:
        return drawing

    def longer(a: Any) -> Any:
        return None if a is None else np.concatenate([a, *[a[-1:]] * more])

    conditions, null = (None if c is None else Conditions(*map(longer, c)) for c in (drawing.conditions, drawing.null))
    arrays = {name: longer(getattr(drawing, name)) for name in ("scale", "image", "mask", "noise")}
    seeds = [*drawing.seeds, *[drawing.seeds[-1]] * more]
    return replace(drawing, seeds=seeds, conditions=cast(Conditions, conditions), null=null, **arrays)
