"""The module of Stable Diffusion 3 (`models.diffusion.sd3` has the equations)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from argosy.models.blocks.layered import DenoiserStep, LayeredDenoiser
from argosy.models.blocks.mmdit import (
    LEGEND,
    FinalLayer,
    JointCondition,
    JointStream,
    Projections,
    VectorEmbedder,
    joint_attention,
)
from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import Attend, Bidirectional
from argosy.models.parts.attention.cache import Spec
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.modulation import modulate
from argosy.models.parts.patches import patchify, unpatchify
from argosy.models.parts.stack import Execution, Layer, Stack
from argosy.models.settings import Reach
from argosy.ops.precision import sums_in
from argosy.parallel.scope import constrain


class SD3Block(nnx.Module):
    """A layer over the streams {image, text}. The last layer returns the text unchanged.

    Args:
        kind: block, dual (with a second attention over the image only), last (does not compute the text stream), or dual_last.
    """

    def __init__(self, config: Any, kind: str):
        self.is_last, is_dual = kind.endswith("last"), kind.startswith("dual")
        self.image = JointStream(config.dims, 9 if is_dual else 6, norms=config.normalizes)
        self.text = JointStream(config.dims, 2 if self.is_last else 6, norms=config.normalizes, mlp=not self.is_last)
        self.second = Projections(config.dims, norms=config.normalizes) if is_dual else None

    def holds(self, each: Reach) -> Spec:
        return Spec()

    def __call__(self, x: dict[str, Array], each: Reach, cache: Any, attend: Attend, condition: JointCondition) -> Any:
        image, text = x["image"], x["text"]
        m, t = self.image.modulated(condition.c), self.text.modulated(condition.c)
        # In diffusers, the modulation of the last text norm has the scale before the shift.
        text_shift, text_scale = (t[1], t[0]) if self.is_last else (t[0], t[1])
        read = [self.text.attn(modulate(text, text_shift, text_scale)), self.image.attn(modulate(image, m[0], m[1]))]
        y = joint_attention(read, attend)
        h = image + m[2][:, None] * self.image.attn.o(y[:, text.shape[1] :])  # pyright: ignore[reportOptionalCall]
        if self.second is not None:
            alone = Bidirectional.whole_rows(*image.shape[:2])
            image_y = joint_attention([self.second(modulate(image, m[6], m[7]))], alone)
            h = h + m[8][:, None] * self.second.o(image_y)  # pyright: ignore[reportOptionalCall]
        out = {"image": h + m[5][:, None] * self.image.mlp(modulate(h, m[3], m[4])), "text": text}  # pyright: ignore[reportOptionalCall]
        if self.text.mlp is not None and self.text.attn.o is not None:
            h = text + t[2][:, None] * self.text.attn.o(y[:, : text.shape[1]])
            out["text"] = h + t[5][:, None] * self.text.mlp(modulate(h, t[3], t[4]))
        return out, cache, {}


class SD3Layers(nnx.Module):
    """The shared base of Stable Diffusion 3 and its ControlNets: computes the input of the layers.

    patch: projects patches of latents to tokens.
    positions: the position embedding of patches.
    vector: embeds the time step and the pooled text in one vector.
    """

    config: Any
    dtype: Any
    patch: Einsum
    positions: Einsum
    vector: VectorEmbedder

    def tokens(self, latents: Float[Array, "B H W C"]) -> Float[Array, "B T D"]:
        """Computes the image tokens from latents, with position embeddings added."""
        patch, (height, width) = self.config.patch, latents.shape[1:3]
        x = self.patch(patchify(latents.astype(self.dtype), patch))
        places = jnp.asarray(self.places(height // patch, width // patch))
        return constrain(x + self.positions.take(places).astype(x.dtype), "B T D")

    def embed_conditions(
        self, streams: dict[str, Float[Array, "B _ D"]], timestep: Float[Array, "B"], pooled: Float[Array, "B O"], size: Any
    ) -> tuple[dict[str, Array], DenoiserStep]:
        """Returns the streams, and the other inputs of the layers.

        Args:
            size: the height and width of the latents.
        """
        c = self.vector(timestep, pooled, None, self.dtype)
        tokens = sum(stream.shape[1] for stream in streams.values())
        attend = Bidirectional.whole_rows(streams["image"].shape[0], tokens)
        return streams, DenoiserStep(attend, JointCondition(c), c, size)

    def places(self, rows: int, columns: int) -> np.ndarray:
        """Returns the rows of the position embedding for an image of rows x columns patches: the middle of the embedding's grid."""
        grid = self.config.grid
        if max(rows, columns) > grid:
            raise ValueError(f"{rows} x {columns} patches; the table of positions has {grid} x {grid}")
        at = np.arange(rows)[:, None] + (grid - rows) // 2, np.arange(columns)[None] + (grid - columns) // 2
        return (at[0] * grid + at[1]).reshape(-1).astype(np.int32)


class SD3(SD3Layers, LayeredDenoiser):
    """Maps noisy latents, time steps and texts to velocities."""

    def __init__(self, config: Any, run: Execution | None):
        self.config, self.dtype, d = config, jnp.float32, config.dims
        self.patch = Einsum("BTI,ID->BTD", d, bias=True, legend=LEGEND)
        self.positions = Einsum("BTA,AD->BTD", d, scale=0.02)
        self.text_embed = Einsum("BTS,SD->BTD", d, bias=True, legend=LEGEND)
        self.vector = VectorEmbedder(config, False)
        plan = [Layer(kind, Reach()) for kind in config.kinds]
        self.layers = Stack(plan, lambda kind: SD3Block(config, kind), run=run)
        self.final = FinalLayer(d)

    def begin(self, latents: Float[Array, "B H W C"], timestep: Float[Array, "B"], conditions: Conditions) -> tuple[Any, DenoiserStep]:
        streams = {"image": self.tokens(latents), "text": self.text_embed(conditions.text.astype(self.dtype))}
        return self.embed_conditions(streams, timestep, conditions.pooled, latents.shape[1:3])

    def end(self, streams: dict[str, Array], step: DenoiserStep) -> Float[Array, "B H W C"]:
        y = self.final(streams["image"], step.c)
        return unpatchify(y.astype(sums_in(y.dtype)), *step.size, self.config.patch)

    def residual_places(self, layers: int, residuals: int) -> list[int | None]:
        # The last layer gets no residual. The division is in floats, as in diffusers.
        return [*(int(i / (layers / residuals)) for i in range(layers - 1)), None]
