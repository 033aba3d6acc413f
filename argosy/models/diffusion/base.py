"""The settings that denoisers share, and the conditions that they read besides noisy images.

    module(latents [B H W C], timestep [B], conditions) -> prediction [B H W C], float32

    Conditions          the inputs of a denoiser besides noisy latents and time steps
    LatentNetConfig     the settings of any network over the positions of latents, including ControlNets
    DenoiserConfig      the settings of a denoiser

Latents are channels last, and may be the images themselves. Models of videos also read [B F H W C], with F latent frames. `timestep` is
in 0 (an image) .. 1000 (noise), as in diffusers. A flow model at noise level sigma reads 1000 sigma. The setting `prediction` says what
the output predicts. A learned variance is not part of the output.

This file does not import jax. `Conditions` is a named tuple, which jax treats as a pytree.
"""

from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from argosy.core.dims import LOOKED_UP, named_axes
from argosy.core.keymap import filled_tensors
from argosy.models.base.config import InputKind, ModelConfig

# velocity: noise - image; epsilon: the noise; v: alpha noise - sigma image; sample: the image; edm: -v, of images divided by their
# standard deviation.
Prediction = Literal["velocity", "epsilon", "v", "sample", "edm"]
# Names of axes, in rows of tensor names, whose weights are applied once for an image and not at every position.
PER_IMAGE = frozenset(["waves", "embedder", "modulation", "final_modulation", "modulated", "pooled", "time_vector"])


class Conditions(NamedTuple):
    """The inputs of a denoiser besides noisy latents and time steps. A model ignores the fields that `DenoiserConfig.conditions` lacks.

    labels: [B], the classes. The last row of the class embedding is the null class.
    text: [B S E], the states of a text encoder.
    text_mask: [B S], the attention mask of the text: 1 for tokens, 0 for padding.
    pooled: [B E], one vector for each text.
    guidance: [B], the guidance scale, for models that are distilled to read it.
    sizes: [B 6], for SDXL: height and width before cropping, top and left of the crop, height and width of the image, in pixels. None:
        the image was not cropped.
    interval: [B], for models of mean velocities: the length of the step, in units of the time step. None: 0.
    control: for each ControlNet, control images [B Y X 3] in 0..1, or their latents [B H W C] if the ControlNet reads latents. None: no
        ControlNet acts.
    control_scale: for each ControlNet, [B R] factors on its residuals. A ControlNet of a UNet has a residual for each skip and for the
        middle. None: 1.
    control_mode: for each ControlNet, [B], the index of the kind of control. Only ControlNets with several kinds (unions) read it.
        None: no ControlNet has several kinds.
    control_acts: [C], above 0 for each ControlNet that acts at this time step. None: all act.
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
    """The images or latents that a denoiser reads.

    channels: the number of channels.
    multiple: the number that must divide height and width.
    classes: the number of classes, without the null class. 0: the denoiser reads no class.
    """

    channels: int
    multiple: int
    classes: int


class LatentNetConfig(ModelConfig):
    """Settings of a network over the positions of images or latents."""

    inputs: ClassVar[InputKind] = "images"
    # Prefixes of the paths of weights that read only text tokens, and of weights that read both image and text tokens.
    text_paths: ClassVar[tuple[str, ...]] = ()
    joint_paths: ClassVar[tuple[str, ...]] = ()

    channels: int = Field(gt=0)
    """Channels of the images or latents C."""

    @property
    def size_multiple(self) -> int:
        """The number that must divide height and width of the inputs."""
        return 1

    def flops(self, tokens: int) -> int:
        """Counts the FLOPs of one forward pass over an image of `tokens` positions. In families that read a text, adds a text of
        `text_tokens` tokens. Weights that read the time step or other conditions count once for an image."""
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

    # The name of the denoiser's folder in a pipeline of diffusers.
    pipeline_part: ClassVar[str] = "transformer"
    # Settings that a pipeline of diffusers stores elsewhere, with the scheduler or the autoencoder.
    pipeline_settings: ClassVar[tuple[str, ...]] = ()
    # Whether the model also reads latents of videos, which have an axis of frames.
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
        """Whether the model was distilled to sample without classifier-free guidance."""
        return False

    @property
    def idle_weights(self) -> tuple[str, ...]:
        """Patterns of the weights that files have but no computation reads."""
        return ()

    @property
    def classes_known(self) -> int:
        """The number of classes, without the null class. 0: the model reads no class."""
        return 0

    @property
    def id_spaces(self) -> ImageSpace:
        return ImageSpace(self.channels, self.size_multiple, self.classes_known)
