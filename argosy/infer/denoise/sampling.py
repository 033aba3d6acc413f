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
    last_state,
    pad_plan,
    row_at,
)
from argosy.infer.denoise.step_cache import StepMemory, cached_prediction, fresh_memory
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
    shape: height, width and channels of the latents; of videos, their frames before them.
    image, mask: to begin from, [B H W C] latents, and where they may change [B H W 1] (None: everywhere).
    noise: [B H W C] the first noise, in place of that of the seeds.
    cache_threshold: of step caching (None: none).
    """

    plan: SamplingPlan
    seeds: Sequence[tuple[int, int]]
    scale: Any
    conditions: Conditions
    null: Conditions | None
    shape: tuple[int, ...]
    image: Any = None
    mask: Any = None
    noise: Any = None
    cache_threshold: float | None = None

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
        # Once for all evaluations.
        conditions, null = jax.device_put((drawing.conditions, drawing.null))
        noise = first_noise(keys, drawing.shape) if drawing.noise is None else jnp.asarray(drawing.noise)
        image = None if drawing.image is None else jnp.asarray(drawing.image)
        fixed = None if drawing.mask is None else FixedParts(jnp.asarray(drawing.mask), cast(Any, image), noise)
        self._state = initial_state(drawing.plan, noise, image)
        if drawing.cache_threshold is not None:
            of = leaves, conditions, null, noise, np.float32(drawing.cache_threshold)
            self._state = self._state._replace(memory=self._programs.memory(*of))
        fresh = keys if np.any(drawing.plan.spread) else None
        self._given = (leaves, conditions, null, jnp.asarray(drawing.scale), fresh, fixed)

    def at_once(self) -> Array:
        """The latents after all evaluations."""
        plan = pad_plan(self.drawing.plan)
        with telling(self._say, "compiling the sampler"):
            self._state = self._programs.whole(*self._given, plan, self._state, self.evaluations)
        return self.latents()

    def step(self, i: int) -> None:
        """Evaluation i."""
        with telling(self._say if i == 0 else None, "compiling the sampler"):
            row = row_at(self.drawing.plan, i)
            self._state = self._programs.step(*self._given, row, self._state, np.int32(i))

    @property
    def layer_runs(self) -> int:
        """In how many evaluations the layers after the first ran."""
        return self.evaluations if self._state.memory is None else int(self._state.memory.runs)

    def predicted(self) -> Array:
        """The latents of the images as they were predicted last."""
        return self._state.predicted

    def latents(self) -> Array:
        """The latents, after the last evaluation, or on their way."""
        return self._state.x * self.drawing.plan.scale[1]


@dataclass(frozen=True)
class _Programs:
    whole: Callable[..., SamplerState]
    step: Callable[..., SamplerState]
    memory: Callable[..., StepMemory]


def step_conditions(config: Any, conditions: Conditions, timestep: Array, level: Array, rows: int) -> Conditions:
    """Conditions with the interval of a step, for models that read one: flows, whose sigma is the time."""
    if "interval" not in config.conditions:
        return conditions
    return conditions._replace(interval=jnp.full(rows, timestep - STEPS * level[1], jnp.float32))


def network_inputs(
    config: Any, conditions: Conditions, null: Conditions | None, x: Array, timestep: Array, level: Array
) -> tuple[Array, Array, Conditions]:
    """Samples, time steps and conditions of an evaluation: with guidance, rows with their prompts, then the same ones without."""
    times = jnp.full(len(x), timestep, jnp.float32)
    with_interval = step_conditions(config, conditions, timestep, level, len(x))
    if null is None:
        return x, times, with_interval
    away = step_conditions(config, null, timestep, level, len(x))
    both = Conditions(*jax.tree.map(lambda a, b: jnp.concatenate([a, b]), tuple(with_interval), tuple(away)))
    return jnp.concatenate([x, x]), jnp.concatenate([times, times]), both


@lru_cache(maxsize=16)
def _programs(graph: Any, guidance: Guidance, guided: bool) -> _Programs:
    def predictor(leaves: Any, conditions: Conditions, null: Conditions | None, scale: Array) -> Predict:
        model = merge(graph, leaves)

        def predict(x: Array, timestep: Array, level: Array, memory: StepMemory | None = None, control: Array | None = None) -> Any:
            samples, times, read = network_inputs(model.config, conditions, null, x, timestep, level)
            inputs = samples, times, read._replace(control_acts=control)
            out, memory = (model(*inputs), None) if memory is None else cached_prediction(model, *inputs, memory)
            out = out.astype(jnp.float32)
            if null is not None:
                out = guidance.apply(out[: len(x)], out[len(x) :], scale, timestep)
            return out if memory is None else (out, memory)

        return predict

    @jax.jit
    def whole(
        leaves: Any, conditions: Any, null: Any, scale: Any, keys: Any, fixed: Any, plan: SamplingPlan, state: Any, evaluations: Any
    ) -> SamplerState:
        return last_state(predictor(leaves, conditions, null, scale), plan, state, keys, fixed, evaluations)

    @partial(jax.jit, donate_argnums=7)
    def step(
        leaves: Any, conditions: Any, null: Any, scale: Any, keys: Any, fixed: Any, row: SamplingPlan, state: Any, i: Any
    ) -> SamplerState:
        fresh = None if keys is None else fresh_noise(keys, i, state.x)
        state = advance(predictor(leaves, conditions, null, scale), state, row, fresh)
        return state if fixed is None else state._replace(x=fixed.apply(state.x, row.level))

    @jax.jit
    def memory(leaves: Any, conditions: Any, null: Any, noise: Any, threshold: Any) -> StepMemory:
        model, zero = merge(graph, leaves), jnp.zeros(2)
        return fresh_memory(model, *network_inputs(model.config, conditions, null, noise, zero[0], zero), threshold)

    return _Programs(whole, step, memory)


@partial(jax.jit, static_argnums=1)
def first_noise(keys: Key[Array, "B"], shape: tuple[int, ...]) -> Float[Array, "B *F H W C"]:
    """The noise that images or videos begin from, each from its own key."""
    return jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(keys)


def padded_drawing(drawing: Drawing) -> Drawing:
    """The batch with its last image repeated up to a power of two, so that few programs are compiled."""
    more = (1 << (len(drawing) - 1).bit_length()) - len(drawing)
    if not more:
        return drawing

    def longer(a: Any) -> Any:
        return None if a is None else np.concatenate([a, *[a[-1:]] * more])

    conditions, null = (
        None if c is None else Conditions(*jax.tree.map(longer, tuple(c))) for c in (drawing.conditions, drawing.null)
    )
    arrays = {name: longer(getattr(drawing, name)) for name in ("scale", "image", "mask", "noise")}
    seeds = [*drawing.seeds, *[drawing.seeds[-1]] * more]
    return replace(drawing, seeds=seeds, conditions=cast(Conditions, conditions), null=null, **arrays)
