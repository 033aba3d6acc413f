"""Draws the latents of a batch of images with compiled programs.

A program is compiled for a batch size (a power of two) and an image size. It serves any number of steps, any seed and any guidance
scale.
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
    """One batch of images to draw, with equal size and plan.

    plan: the sampling plan.
    seeds: for each image its seed, and its index among the images of its prompt.
    scale: [B] the guidance scale of each image.
    conditions: the conditions of the prompts.
    null: the conditions of negative or empty prompts; None: no guidance.
    shape: height, width and channels of the latents; for videos, frames come first.
    image: [B H W C] the latents to begin from; None: noise alone.
    mask: [B H W 1] 1 where `image` is redrawn; None: everywhere.
    noise: [B H W C] the initial noise; None: drawn from the seeds.
    cache_threshold: threshold of step caching; None: no step caching.
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
    """Samples one batch, evaluation by evaluation (`step`), or in one program (`at_once`).

    Args:
        graph, leaves: the denoiser's module, split (`models.parts.weight.split`).
        drawing: the batch, padded to a size that programs are compiled for (`padded_drawing`).
        guidance: the variant of classifier-free guidance.
        say: called with the name of the program that is being compiled, if compiling takes longer than a second.
    """

    def __init__(self, graph: Any, leaves: Any, drawing: Drawing, guidance: Guidance, say: Say | None = None):
        self.drawing, self.evaluations, self._say = drawing, drawing.plan.evaluations, say
        self._programs = _programs(graph, guidance, drawing.null is not None)
        keys = jnp.stack([jax.random.fold_in(jax.random.key(seed), i) for seed, i in drawing.seeds])
        # Moved to the device once, for all evaluations.
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
        """Runs all evaluations in one program. Returns the latents."""
        plan = pad_plan(self.drawing.plan)
        with telling(self._say, "compiling the sampler"):
            self._state = self._programs.whole(*self._given, plan, self._state, self.evaluations)
        return self.latents()

    def step(self, i: int) -> None:
        """Runs evaluation i."""
        with telling(self._say if i == 0 else None, "compiling the sampler"):
            row = row_at(self.drawing.plan, i)
            self._state = self._programs.step(*self._given, row, self._state, np.int32(i))

    @property
    def layer_runs(self) -> int:
        """The number of evaluations so far in which the layers after the first ran; without step caching, the number of all."""
        return self.evaluations if self._state.memory is None else int(self._state.memory.runs)

    def predicted(self) -> Array:
        """The latents of the finished images, as the last evaluation predicted them."""
        return self._state.predicted

    def latents(self) -> Array:
        """The current latents. After the last evaluation these are the result."""
        return self._state.x * self.drawing.plan.scale[1]


@dataclass(frozen=True)
class _Programs:
    whole: Callable[..., SamplerState]
    step: Callable[..., SamplerState]
    memory: Callable[..., StepMemory]


def step_conditions(config: Any, conditions: Conditions, timestep: Array, level: Array, rows: int) -> Conditions:
    """Adds the length of a step to the conditions, for models that are conditioned on it. These are flow models, whose sigma is the
    time.

    Args:
        config: the denoiser's settings.
        level: alpha and sigma after the step.
        rows: number of rows.
    """
    if "interval" not in config.conditions:
        return conditions
    return conditions._replace(interval=jnp.full(rows, timestep - STEPS * level[1], jnp.float32))


def network_inputs(
    config: Any, conditions: Conditions, null: Conditions | None, x: Array, timestep: Array, level: Array
) -> tuple[Array, Array, Conditions]:
    """The samples, timesteps and conditions of an evaluation. With guidance, the batch is doubled: first all rows with their prompts,
    then all rows with `null`."""
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
    """The initial noise of images or videos, each drawn from its own key."""
    return jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(keys)


def padded_drawing(drawing: Drawing) -> Drawing:
    """Pads a batch to a power of two by repeating its last image, so that few programs are compiled."""
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
