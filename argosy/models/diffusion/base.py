"""`DenoiserConfig`: the settings that every denoiser has, and `Conditions`: what it may read beside noisy images.
`LatentNetConfig`: those of any network over the positions of latents, a ControlNet too.

    module(latents [B H W C], timestep [B], conditions) -> prediction [B H W C], float32

Latents are channels last; they may be the images themselves. Models that draw videos read [B F H W C] too, with F frames of latents.
`timestep` counts as diffusers does, from 0 (an image) to 1000 (noise); a flow model at noise level sigma reads 1000 sigma. What the
output predicts is `prediction`: a learned variance is split off.

This file imports no jax: `Conditions` is a named tuple, which jax knows as a tree.
"""

from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from argosy.core.dims import LOOKED_UP, named_axes
from argosy.core.keymap import filled_tensors
from argosy.models.base.config import InputKind, ModelConfig

# velocity: noise - image; epsilon: the noise; v: alpha noise - sigma image; sample: the image; edm: -v, of images in units of their
# deviation.
Prediction = Literal["velocity", "epsilon", "v", "sample", "edm"]
# Axes of weights that are computed with once for an image, as hub tables name them.
PER_IMAGE = frozenset(["waves", "embedder", "modulation", "final_modulation", "modulated", "pooled", "time_vector"])


class Conditions(NamedTuple):
    """What a denoiser reads beside noisy images. A model ignores those that it does not list (`DenoiserConfig.conditions`).

    labels: [B] classes; the last row of the table is the null class.
    text: [B S E] states of a text encoder.
    text_mask: [B S] 1 for the tokens of a text, 0 for padding.
    pooled: [B E] one vector for each text.
    guidance: [B] the scale of guidance, for models that learned it.
    sizes: [B 6] for SDXL: height and width before cropping, top and left of the crop, height and width of the image, in pixels. None:
        the image was not cropped.
    interval: [B] for models of mean velocities: from the time step back to the end of the step. None: empty.
    control: for each ControlNet beside the model, [B Y X 3] images in 0..1, in pixels, or their latents [B H W C] where it reads these.
        None: none acts.
    control_scale: for each, [B R] factors on what it adds to the model: of a UNet to each skip and the middle. None: 1.
    control_mode: for each, [B] the number of the kind of control, for those that know several (unions); others ignore it. None: none
        knows several.
    control_acts: [C] above 0 for those that act at this step. None: all do.
    """

    labels: Any = None
    text: Any = None
    text_mask: Any = None
    pooled: Any = None
    guidance: Any = None
    sizes: Any = None
    interval: Any = None
    control: Any = None
    control_scale: Any = None
    control_mode: Any = None
    control_acts: Any = None


class ImageSpace(NamedTuple):
    """What a denoiser asks of images.

    channels: of an image or of its latents.
    multiple: divides height and width.
    classes: number of classes that it knows, without the null class; 0 if it reads none.
    """

    channels: int
    multiple: int
    classes: int


class LatentNetConfig(ModelConfig):
    """Settings of a network over the positions of images or latents."""

    inputs: ClassVar[InputKind] = "images"
    # What the paths of weights begin with that read the tokens of the text, or those of image and text.
    text_paths: ClassVar[tuple[str, ...]] = ()
    joint_paths: ClassVar[tuple[str, ...]] = ()

    channels: int = Field(gt=0)
    """Channels of the images or latents C."""

    @property
    def size_multiple(self) -> int:
        """The number that divides height and width of its inputs."""
        return 1

    def flops(self, tokens: int) -> int:
        """FLOPs of one forward pass over an image of `tokens` positions, and a text of `text_tokens` in families that read one. What
        reads the time step and the other conditions is computed once for an image."""
        text, total = getattr(self, "text_tokens", 0), 0
        for tensor in filled_tensors(*self.hub_rows()):
            axes = set(named_axes(tensor.axes))
            if not tensor.path.endswith(".w") or LOOKED_UP & axes:
                continue
            times = tokens
            if PER_IMAGE & axes:
                times = 1
            elif tensor.path.startswith(self.text_paths):
                times = text
            elif tensor.path.startswith(self.joint_paths):
                times = tokens + text
            total += 2 * times * tensor.size * tensor.layers
        return int(total) + self.mixing_flops(tokens)


class DenoiserConfig(LatentNetConfig):
    """Settings of a denoiser."""

    # What its folder is called in a pipeline of diffusers.
    pipeline_part: ClassVar[str] = "transformer"
    # Settings that such a folder has elsewhere: in its scheduler's, or its autoencoder's.
    pipeline_settings: ClassVar[tuple[str, ...]] = ()
    # Whether it reads latents with an axis of frames too.
    draws_videos: ClassVar[bool] = False

    prediction: Prediction = "velocity"
    """What the output predicts. velocity: noise - image, on straight paths (flow matching); epsilon: the noise; v: alpha noise - sigma
    image; sample: the image; edm: -v of images in units of their deviation, for `objective=edm`. Training and samplers read it here; a
    diffusers folder has it in its scheduler's settings."""

    @property
    def conditions(self) -> frozenset[str]:
        """The fields of `Conditions` that the model reads."""
        return frozenset()

    @property
    def distilled(self) -> bool:
        """Whether it was distilled to draw without guidance."""
        return False

    @property
    def idle_weights(self) -> tuple[str, ...]:
        """Patterns of the weights that files have and that nothing reads."""
        return ()

    @property
    def classes_known(self) -> int:
        """Number of classes without the null class; 0 if it reads none."""
        return 0

    @property
    def id_spaces(self) -> ImageSpace:
        return ImageSpace(self.channels, self.size_multiple, self.classes_known)
