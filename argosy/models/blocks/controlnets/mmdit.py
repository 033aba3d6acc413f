"""Shared code of ControlNets of Flux and Stable Diffusion 3: zero-initialized layers, and the denoiser with ControlNets."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.blocks.layered import DenoiserStep, LayeredDenoiser, LayerPart
from argosy.models.blocks.mmdit import LEGEND
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.einsum import Einsum


def zero_projection(dims: dict[str, int]) -> Einsum:
    """A zero-initialized linear layer from the tokens after a ControlNet's layer to the residual that the denoiser adds."""
    return Einsum("BTD,DR->BTR", dims, bias=True, scale=0.0, legend=LEGEND)


def control_patch(dims: dict[str, int]) -> Einsum:
    """A zero-initialized linear layer from patches of a control image's latents to tokens."""
    return Einsum("BTI,ID->BTD", dims, bias=True, scale=0.0, legend=LEGEND)


class ControlledMMDiT(LayeredDenoiser):
    """A denoiser with joint attention, steered by ControlNets. It is called like the denoiser.

    ControlNets act if there are control images. Their residuals are summed.
    """

    def __init__(self, denoiser: LayeredDenoiser, controlnets: Sequence[Any]):
        self.denoiser, self.controlnets = denoiser, nnx.List(controlnets)

    @property
    def config(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.denoiser.config

    def begin(self, latents: Float[Array, "B H W C"], timestep: Float[Array, "B"], conditions: Conditions) -> tuple[Any, DenoiserStep]:
        streams, step = self.denoiser.begin(latents, timestep, conditions)
        if conditions.control is None:
            return streams, step
        by_stack: dict[str, list[Array]] = {}
        for i, (net, control) in enumerate(zip(self.controlnets, conditions.control, strict=True)):
            scale, mode, acts = (
                None if values is None else values[i]
                for values in (conditions.control_scale, conditions.control_mode, conditions.control_acts)
            )

            def residuals(net: Any = net, control: Any = control, scale: Any = scale, mode: Any = mode) -> dict[str, Array]:
                added = net(latents, timestep, conditions, control, mode, streams["image"])
                if scale is None:
                    return added
                # All residuals of a ControlNet have the same factor.
                return {name: value * scale[None, :, :1, None].astype(value.dtype) for name, value in added.items()}

            def nothing(residuals: Any = residuals) -> dict[str, Array]:
                return jax.tree.map(lambda value: jnp.zeros(value.shape, value.dtype), jax.eval_shape(residuals))

            outputs = residuals() if acts is None else jax.lax.cond(acts > 0, residuals, nothing)
            for name in outputs:
                by_stack.setdefault(name, []).append(outputs[name])
        return streams, step._replace(residuals=by_stack)

    def layered(self, streams: Any, step: DenoiserStep, part: LayerPart = "all") -> Any:
        return self.denoiser.layered(streams, step, part)

    def end(self, streams: Any, step: DenoiserStep) -> Float[Array, "B H W C"]:
        return self.denoiser.end(streams, step)
