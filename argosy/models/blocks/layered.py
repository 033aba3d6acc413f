"""`LayeredDenoiser`: denoisers whose layers follow each other, in three parts.

    streams, step = begin(latents, timestep, conditions)        streams = layered(streams, step)        end(streams, step)

Who runs the parts one by one may leave out layers, as step caching does (`infer.denoise.step_cache`).
"""

from typing import Any, Literal, NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from argosy.models.diffusion.base import Conditions
from argosy.models.parts.attention.attend import Attend

LayerPart = Literal["all", "first", "rest"]
# From which layer to which each part goes.
SPANS: dict[str, tuple[int, int | None]] = {"all": (0, None), "first": (0, 1), "rest": (1, None)}


class DenoiserStep(NamedTuple):
    """What layers and output read at a time step.

    attend: how tokens see each other.
    condition: what layers get.
    c: the vector of the time step.
    size: height and width of the latents.
    frames: of the latents of a video; None: they are those of an image.
    """

    attend: Attend
    condition: Any
    c: Array
    size: tuple[int, int]
    frames: int | None = None


class LayeredDenoiser(nnx.Module):
    """Noisy latents, time steps and conditions to predictions, by layers over tokens.

    config: of its family.
    """

    config: Any

    def begin(
        self, latents: Float[Array, "B *F H W C"], timestep: Float[Array, "B"], conditions: Conditions
    ) -> tuple[Any, DenoiserStep]:
        """What flows into the first layer, an array or {image, text}, and what layers read."""
        raise NotImplementedError

    def layered(self, streams: Any, step: DenoiserStep, part: LayerPart = "all") -> Any:
        """The streams after the layers, after the first one, or from there after the rest."""
        raise NotImplementedError

    def end(self, streams: Any, step: DenoiserStep) -> Float[Array, "B *F H W C"]:
        """The prediction, of what the last layer gave."""
        raise NotImplementedError

    def __call__(
        self, latents: Float[Array, "B *F H W C"], timestep: Float[Array, "B"], conditions: Conditions
    ) -> Float[Array, "B *F H W C"]:
        streams, step = self.begin(latents, timestep, conditions)
        return self.end(self.layered(streams, step), step)
