"""Step caching: if the first layer changes little between evaluations, the change made by all other layers is reused.

    h = first layer(x)                        d = h - x                     for the image's tokens
    moved = mean |d - d_kept| / mean |d_kept|
    moved > threshold, or nothing is kept     y = other layers(h), and keep d and y - h
    otherwise                                 y = h + (y - h)_kept

This is the first-block caching of ParaAttention and of diffusers' `FirstBlockCache`; the idea is that of TeaCache (Liu et al. 2024,
arXiv:2411.19108). Unlike there, the decision is made for each image, and separately for its rows with and without prompt, so an image
is the same in any batch. The other layers run if any row of the batch needs them.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from argosy.core.errors import BadInput
from argosy.models.blocks.layered import LayeredDenoiser
from argosy.models.diffusion.base import Conditions
from argosy.ops.precision import wide


class StepMemory(NamedTuple):
    """The arrays kept between evaluations. The R rows are the images; with guidance, followed by the same images without prompt.

    threshold: the relative change above which the other layers run.
    known: [R] whether anything is kept for a row.
    first: [R T D] the change that the first layer made to the image's tokens when the other layers last ran.
    rest: the change that the other layers made then, a pytree of streams [R T D].
    runs: the number of evaluations in which the other layers ran.
    """

    threshold: Float[Array, ""]
    known: Bool[Array, "R"]
    first: Float[Array, "R T D"]
    rest: Any
    runs: Int[Array, ""]


@dataclass
class CacheReport:
    """The effect of step caching in one call of `ImagePipeline.images`.

    evaluations: number of evaluations of the network, each batch counted once.
    reused: number of evaluations in which the layers after the first did not run.
    errors: for each image, the root mean square error of its latents against those drawn without step caching, divided by the root mean
        square of the latter; empty unless they were compared.
    """

    evaluations: int = 0
    reused: int = 0
    errors: list[float] = field(default_factory=list)

    def count(self, evaluations: int, layer_runs: int) -> None:
        """Adds the counts of a batch: its evaluations, and those in which the layers after the first ran."""
        self.evaluations += evaluations
        self.reused += evaluations - layer_runs

    def compare(self, latents: Any, full: Any) -> None:
        """Adds the errors of a batch: latents [B H W C], or of videos, against `full`, those drawn without step caching."""
        latents, full = (np.asarray(a, np.float64) for a in (latents, full))
        axes = tuple(range(1, full.ndim))
        size = np.sqrt(np.mean(full**2, axes))
        self.errors += [float(e) for e in np.sqrt(np.mean((latents - full) ** 2, axes)) / size]


def check_step_cache(module: Any, threshold: float) -> None:
    """Checks that step caching is possible.

    Args:
        module: the module of the denoiser.

    Raises:
        BadInput: the threshold is not above 0, or the denoiser is not a sequence of at least two layers.
    """
    if not 0 < threshold < np.inf:
        raise BadInput(f"step_cache = {threshold}: above 0; 0.05 to 0.2 are usual")
    if not isinstance(module, LayeredDenoiser):
        problem = f"step_cache = {threshold}: {type(module).__name__} has no layers that follow each other, as transformers have"
        raise BadInput(problem, hint="leave out `step_cache`")
    if module.config.layers + getattr(module.config, "single_layers", 0) < 2:
        raise BadInput(f"step_cache = {threshold}: this model has one layer, after which there is nothing to reuse")


def fresh_memory(model: LayeredDenoiser, x: Array, times: Array, conditions: Conditions, threshold: Any) -> StepMemory:
    """The memory before the first evaluation, with nothing kept. `x`, `times` and `conditions` are used for their shapes."""
    streams, _ = model.begin(x, times, conditions)
    rest = jax.tree.map(jnp.zeros_like, streams)
    is_known = jnp.zeros(len(x), bool)
    return StepMemory(jnp.float32(threshold), is_known, image_stream(rest), rest, jnp.int32(0))


def cached_prediction(
    model: LayeredDenoiser, x: Float[Array, "R *F H W C"], times: Float[Array, "R"], conditions: Conditions, memory: StepMemory
) -> tuple[Float[Array, "R *F H W C"], StepMemory]:
    """Evaluates the network with step caching. Returns its prediction, and the updated memory."""
    before, step = model.begin(x, times, conditions)
    after = model.layered(before, step, "first")
    first = image_stream(after) - image_stream(before)
    axes = (1, 2)
    change = jnp.mean(jnp.abs(wide(first - memory.first)), axes) / jnp.mean(jnp.abs(wide(memory.first)), axes)
    # Rows whose change is NaN are computed: the kept change was 0, or values are not finite.
    computed = ~memory.known | ~(change <= memory.threshold)

    def select(ours: Array, stored: Array) -> Array:
        return jnp.where(computed[:, None, None], ours, stored)

    def run() -> tuple[Any, StepMemory]:
        streams = model.layered(after, step, "rest")
        changed = jax.tree.map(jnp.subtract, streams, after)
        rest, first_output = jax.tree.map(select, changed, memory.rest), select(first, memory.first)
        updated = memory._replace(known=jnp.ones_like(memory.known), first=first_output, rest=rest, runs=memory.runs + 1)
        return jax.tree.map(select, streams, reused()[0]), updated

    def reused() -> tuple[Any, StepMemory]:
        return jax.tree.map(jnp.add, after, memory.rest), memory

    streams, memory = jax.lax.cond(jnp.any(computed), run, reused)
    return model.end(streams, step), memory


def image_stream(streams: Any) -> Float[Array, "R T D"]:
    """The stream of the image's tokens, whose change decides. Models without a separate text stream have one stream."""
    return streams["image"] if isinstance(streams, dict) else streams
