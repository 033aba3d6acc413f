"""ControlNets in bundles that draw: each control image is an input of the program, as pixels of the size of what is drawn.

    control_image, control_image_2 ...     [batch, H, W, 3] uint8, or `control_image_file`: PNG and the like, resized to that size
    control_scale, control_scale_2 ...     [batch] float32, 1 unless given
    control_mode, control_mode_2 ...       [batch] int32, of ControlNets that know several kinds of control

A ControlNet acts in every step, on rows with a negative prompt too: spans of steps and guess mode are not in bundles.
"""

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from argosy.core.formats.png import png_bytes
from argosy.export.control_inputs import FILE, IMAGE, MODE, SCALE, control_suffixes
from argosy.export.manifest import TensorSignature
from argosy.export.signatures import BATCH
from argosy.export.steps import DecodeImageStep
from argosy.infer.denoise.control import LARGEST_SCALE, check_patches, remove_shift
from argosy.infer.denoise.pipeline import ImagePipeline
from argosy.models.diffusion.base import Conditions


class BundledControl:
    """The ControlNets of a pipeline in its bundle.

    Args:
        size: height and width of the images in pixels.

    Raises:
        BadInput: a ControlNet does not read images of this size.
    """

    def __init__(self, pipeline: ImagePipeline, size: tuple[int, int]):
        self.configs = [net.config for net in pipeline.controlnets]
        check_patches(self.configs, size, pipeline.factor)
        self.ends = control_suffixes(len(self.configs))
        self.size, self.channels = size, pipeline.config.channels
        self.autoencoder = None if pipeline.autoencoder is None else pipeline.autoencoder.config

    @property
    def steps(self) -> list[DecodeImageStep]:
        """Files to pixels, as `argosy generate` and `argosy serve` read them: an image of another ratio is stretched, and opacity is
        ignored."""
        how: Any = {"height": self.size[0], "width": self.size[1], "resize": "stretch", "rescale_factor": 1.0}
        how["transparency"] = "ignore"
        return [DecodeImageStep(input=f"{FILE}{end}", image=f"{IMAGE}{end}", **how) for end in self.ends]

    @property
    def example(self) -> dict[str, list[Any]]:
        """Inputs for a first call: black images."""
        black = base64.b64encode(png_bytes(np.zeros((*self.size, 3), np.uint8))).decode()
        modes = {f"{MODE}{end}": [0] for end, _ in self._unions()}
        return {f"{FILE}{end}": [black] for end in self.ends} | modes

    def inputs(self) -> Iterator[TensorSignature]:
        """The inputs of the program."""
        for i, end in enumerate(self.ends):
            which = "the ControlNet" if len(self.ends) == 1 else f"ControlNet {i + 1}"
            about = f"what {which} follows, RGB"
            yield TensorSignature(name=f"{IMAGE}{end}", shape=[BATCH, *self.size, 3], dtype="uint8", description=about)
            about, limits = f"how strongly {which} acts", {"default": 1, "minimum": 0, "maximum": LARGEST_SCALE}
            yield TensorSignature(name=f"{SCALE}{end}", shape=[BATCH], dtype="float32", description=about, **limits)
        for end, modes in self._unions():
            about = f"number of the kind of `{IMAGE}{end}`"
            yield TensorSignature(name=f"{MODE}{end}", shape=[BATCH], dtype="int32", description=about, minimum=0, maximum=modes - 1)

    def put_on(self, module: Any, inputs: Mapping[str, Array], *rows: Conditions) -> tuple[Conditions, ...]:
        """Conditions of the rows, with their control.

        Args:
            module: it has the pipeline's autoencoder, if there is one.
            rows: of the prompts, and of what guidance leads away from.
        """
        images, scales, modes, union_ends = [], [], [], [end for end, _ in self._unions()]
        for config, end in zip(self.configs, self.ends, strict=True):
            pixels = inputs[f"{IMAGE}{end}"].astype(jnp.float32) / 255
            images.append(remove_shift(config, self.autoencoder, self._latents(module, pixels)) if config.reads_latents else pixels)
            scales.append(jnp.repeat(inputs[f"{SCALE}{end}"][:, None], config.residual_count, 1))
            modes.append(inputs[f"{MODE}{end}"] if end in union_ends else jnp.zeros(len(pixels), jnp.int32))
        more: Any = {"control": tuple(images), "control_scale": tuple(scales), "control_mode": tuple(modes) if union_ends else None}
        return tuple(conditions._replace(**more) for conditions in rows)

    def _latents(self, module: Any, pixels: Float[Array, "B H W 3"]) -> Float[Array, "B h w C"]:
        """As `ImagePipeline.encode`: the mean, where the encoder gives a distribution."""
        channels = self.channels if self.autoencoder is None else self.autoencoder.channels
        pixels = pixels.mean(-1, keepdims=True) if channels == 1 else pixels
        if self.autoencoder is None:
            return pixels * 2 - 1
        return module.autoencoder.to_latents(module.autoencoder.encode(pixels * 2 - 1))

    def _unions(self) -> list[tuple[str, int]]:
        """The end of the names of each ControlNet that knows several kinds of control, and how many."""
        modes = ((end, getattr(config, "modes", None)) for end, config in zip(self.ends, self.configs, strict=True))
        return [(end, count) for end, count in modes if count]


def bundled_control(pipeline: ImagePipeline, size: tuple[int, int]) -> BundledControl | None:
    """The ControlNets of a pipeline in its bundle; None where it has none."""
    return BundledControl(pipeline, size) if pipeline.controlnets else None
