"""`ImagePipeline`: draws images and videos from prompts, `argosy.load(folder).images(prompts)`.

    prompts -> conditions -> latents by the sampler's plan -> images        each stage is checked for values that are not finite

The noise of an image depends only on the seed and its number, so an image is the same in any batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.infer.denoise.autoencoder import ImageAutoencoder, latent_frames
from argosy.infer.denoise.control import (
    Control,
    check_controlnet,
    check_patches,
    control_of,
    for_each,
    net_suffix,
    remove_shift,
    with_span,
)
from argosy.infer.denoise.finite import check_finite
from argosy.infer.denoise.guidance import Guidance
from argosy.infer.denoise.pictures import as_uint8, given_images, in_color
from argosy.infer.denoise.plan import SamplingPlan
from argosy.infer.denoise.sampling import Drawing, SamplingRun, padded_drawing
from argosy.infer.denoise.settings import SAMPLERS, SamplerSettings
from argosy.infer.denoise.step_cache import CacheReport, check_step_cache
from argosy.models.blocks.controlnets.controlled import with_controlnets
from argosy.models.diffusion.base import Conditions, DenoiserConfig
from argosy.models.parts.weight import split

Output = Literal["uint8", "float", "latents"]
# Number of images that the autoencoder encodes at a time.
ENCODED_TOGETHER = 8


@runtime_checkable
class PromptEncoder(Protocol):
    """Converts prompts to conditions of a denoiser: text encoders with their tokenizers, or a table of classes."""

    def encode(self, texts: Sequence[str]) -> Conditions:
        """Returns the conditions of these prompts, a row for each. Raises BadInput for an invalid prompt, such as an unknown class."""
        ...

    def null(self, count: int) -> Conditions:
        """Returns `count` rows of conditions without a prompt, for classifier-free guidance."""
        ...


@dataclass(frozen=True)
class ImageDefaults:
    """The default arguments of `ImagePipeline.images`.

    steps: number of sampling steps.
    guidance: the guidance scale; 1: no guidance.
    size: height and width in pixels.
    frames: number of frames of the videos that the model was made for; None: it draws images only.
    """

    steps: int
    guidance: float
    size: tuple[int, int]
    frames: int | None = None


class ImagePipeline:
    """Draws images with a denoiser.

    Args:
        denoiser: the module of the denoiser.
        prompts: converts prompts to conditions.
        sampler: the sampler, unless a call names another.
        defaults: the default arguments of `images`.
        autoencoder: the module of the autoencoder; None: the denoiser draws pixels, in -1..1.
        guidance: the variant of classifier-free guidance; None: the plain one.
        say: called with the name of the program that is being compiled, if compiling takes longer than a second; also with warnings.
        controlnets: the modules of ControlNets, which steer the denoiser by control images.

    Raises:
        BadInput: a ControlNet does not fit this denoiser.
    """

    def __init__(
        self,
        denoiser: Any,
        prompts: PromptEncoder,
        sampler: SamplerSettings,
        defaults: ImageDefaults,
        autoencoder: Any = None,
        guidance: Guidance | None = None,
        say: Say | None = None,
        controlnets: Sequence[Any] = (),
    ):
        self.denoiser, self.prompts, self.sampler, self.defaults = denoiser, prompts, sampler, defaults
        self.autoencoder, self.guidance, self.say = autoencoder, guidance or Guidance(), say
        # Writes the pipeline as a diffusers folder. Set if it was read from one (`infer.denoise.folder`).
        self.writer: Callable[[ImagePipeline, Path], None] | None = None
        # Writes the pipeline as a bundle. Set by `argosy.load`.
        self.exporter: Callable[..., Any] | None = None
        self._autoencoder = None if autoencoder is None else ImageAutoencoder(autoencoder)
        self.controlnets = tuple(controlnets)
        for i, controlnet in enumerate(controlnets):
            which = "" if len(controlnets) == 1 else f" {i + 1} of {len(controlnets)}"
            check_controlnet(controlnet.config, denoiser.config, self.factor, which)
        # The denoiser, with the ControlNets that steer it.
        self.steered_denoiser = with_controlnets(denoiser, controlnets) if controlnets else denoiser
        self._graph, self._leaves = split(self.steered_denoiser)

    def save(self, folder: str | Path) -> None:
        """Writes a diffusers folder.

        Raises:
            BadInput: the pipeline was not read from one, or the folder exists.
        """
        if self.writer is None:
            raise BadInput("this pipeline was not read from a diffusers folder", hint="argosy.load(FOLDER).save(OUT)")
        self.writer(self, Path(folder))

    @property
    def config(self) -> DenoiserConfig:
        """The denoiser's settings."""
        return self.denoiser.config

    @property
    def factor(self) -> int:
        """The ratio of an image's height and width to those of its latents."""
        return 1 if self.autoencoder is None else self.autoencoder.config.factor

    @property
    def frame_factor(self) -> int:
        """The number of video frames for each latent frame after the first; 0: the model draws images only."""
        if not self.config.draws_videos:
            return 0
        return 1 if self.autoencoder is None else self.autoencoder.config.frame_factor

    def images(
        self,
        prompts: str | Sequence[str],
        *,
        steps: int | None = None,
        guidance: float | None = None,
        negative: str | Sequence[str] | None = None,
        seed: int | Sequence[int] = 0,
        size: int | tuple[int, int] | None = None,
        frames: int | None = None,
        n: int = 1,
        latents: Any = None,
        image: Any = None,
        mask: Any = None,
        strength: float = 1.0,
        control_image: Any = None,
        control_scale: float | Sequence[float] = 1.0,
        control_start: float | Sequence[float] = 0.0,
        control_end: float | Sequence[float] = 1.0,
        control_mode: int | Sequence[int | None] | None = None,
        guess_mode: bool = False,
        sampler: SamplerSettings | None = None,
        step_cache: float | None = None,
        compare: bool = False,
        report: Callable[[CacheReport], None] | None = None,
        output: Output = "uint8",
        batch: int = 8,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Draws `n` images of each prompt, [N H W 3], or with `frames` videos, [N F H W 3]. Images of the first prompt come first.

        Arguments that are None take the pipeline's defaults, unless they say otherwise.

        Args:
            steps: number of sampling steps. More are slower and give finer images.
            guidance: the scale of classifier-free guidance, which makes images follow prompts more closely; 1: no guidance.
            negative: negative prompt, which guidance leads images away from; one for all prompts, or one for each.
            seed: the seed of the noise; one for all prompts, or one for each. Image i of a prompt depends only on the seed and i.
            size: height and width in pixels; one number for a square.
            frames: number of frames of videos, for models that draw them. For Wan it is a multiple of 4, plus 1. None: images.
            n: number of images of each prompt.
            latents: the initial noise, as diffusers shapes it: [N C H W], for videos [N C F H W]. With it, images equal those of
                diffusers. None: drawn from the seed.
            image: images to begin from (image to image), [N H W 3] uint8, or floats in 0..1; None: noise alone.
            mask: [N H W], 1 where `image` is redrawn, 0 where it stays (inpainting).
            strength: the share of the steps that are run on `image`, above 0, up to 1. At 1 nothing of the image is left.
            control_image: for a pipeline with a ControlNet, images of edges, depths or poses that it follows, [N H W 3] uint8, or
                floats in 0..1. For several ControlNets, a list of these in their order.
            control_scale: the strength of the ControlNet; 1 is what it was trained with. One number for all ControlNets, or one for
                each.
            control_start, control_end: the shares of the steps after which the ControlNet begins and ends to act. One number for all
                ControlNets, or one for each.
            control_mode: for a ControlNet with several kinds of control (a union ControlNet of Flux), the number of the control
                image's kind. For several ControlNets, a list, with None for those with one kind.
            guess_mode: whether the ControlNet acts only on predictions with the prompt, and less on fine details. For UNets only.
            sampler: the sampler to use in place of the model's.
            step_cache: threshold of step caching, 0.05 to 0.2 usually. The change that the layers after the first make is reused until
                the first layer's change differs by more than this share. None: all layers run in every step.
            compare: whether to draw with and without `step_cache`, and report the error.
            report: called with the counts and errors of step caching.
            output: `uint8`; `float`: in 0..1; `latents`: [N H W C], not decoded.
            batch: the most images in a batch.
            progress: called after each evaluation with the number of evaluations done and of all evaluations, for each batch.

        Raises:
            BadInput: a size, a number or an array does not fit the model.
            ArgosyError: a stage, which the error names, returned values that are not finite.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts or n < 1 or batch < 1:
            raise BadInput(f"{len(texts)} prompts, n = {n}, batch = {batch}: at least 1 of each")
        seeds = [seed] * len(texts) if isinstance(seed, int) else list(seed)
        negatives = [negative] * len(texts) if negative is None or isinstance(negative, str) else list(negative)
        prompt_text = " ".join(text.lower() for text in [*texts, *negatives] if text)
        unnamed = [token for token in getattr(self.prompts, "learned_tokens", ()) if token not in prompt_text]
        if unnamed and self.say is not None:
            self.say(f"no prompt names {', '.join(unnamed)}: the learned embeddings of these change nothing")
        for name, values in (("seeds", seeds), ("negative prompts", negatives)):
            if len(values) != len(texts):
                raise BadInput(f"{len(values)} {name} for {len(texts)} prompts")
        if step_cache is not None:
            check_step_cache(self.denoiser, step_cache)
        elif compare:
            raise BadInput("compare without step_cache: nothing differs from the full drawing", hint="step_cache=0.1")
        sampler_settings, cached = sampler or self.sampler, CacheReport()
        height, width = self.checked_size(size)
        shape = (height // self.factor, width // self.factor, self.config.channels)
        if frames is not None:
            if image is not None:
                raise BadInput("a video begins from noise alone: `image` is for images", hint="leave out `image` or `frames`")
            shape = (self.checked_frames(frames), *shape)
        rows = [(p, i) for p in range(len(texts)) for i in range(n)]
        noise = None if latents is None else self._given_noise(latents, len(rows), shape)
        begun, fixed = self.encode_given(image, mask, len(rows), (height, width))
        steps = self.defaults.steps if steps is None else steps
        share, frame_count = 1.0 if image is None else strength, 1 if frames is None else shape[0]
        plan = self.plan(sampler_settings, steps, (height, width), share, frame_count)
        control = self.control(control_image, len(rows), (height, width), control_scale, guess_mode, control_mode)
        if control is not None:
            spans = ("control_start", control_start), ("control_end", control_end)
            plan = with_span(plan, *(for_each(name, shares, len(self.controlnets)) for name, shares in spans))
        scale = self.defaults.guidance if guidance is None else guidance
        parts = []
        for at in range(0, len(rows), batch):
            some, span = rows[at : at + batch], slice(at, at + batch)
            conditions = self.conditions([texts[p] for p, _ in some], [negatives[p] for p, _ in some], scale)
            drawing = Drawing(
                plan,
                [(seeds[p], i) for p, i in some],
                np.full(len(some), scale, np.float32),
                *(conditions if control is None else control.put_on(*conditions, span)),
                shape,
                *(None if array is None else array[span] for array in (begun, fixed, noise)),
                cache_threshold=step_cache,
            )
            final = self.draw(drawing, progress, cached)
            if compare:
                cached.compare(final, self.draw(replace(drawing, cache_threshold=None)))
            parts.append(final if output == "latents" else self.decode(final))
        if step_cache is not None and report is not None:
            report(cached)
        result = np.concatenate(parts)
        return as_uint8(result) if output == "uint8" else result

    def checked_size(self, size: int | tuple[int, int] | None) -> tuple[int, int]:
        """Returns height and width in pixels; None: the pipeline's default.

        Raises:
            BadInput: they are not multiples of the number of pixels that the model needs.
        """
        height, width = self.defaults.size if size is None else (size, size) if isinstance(size, int) else size
        multiple = self.factor * self.config.size_multiple
        if height < 1 or width < 1 or height % multiple or width % multiple:
            near = tuple(max(multiple, round(side / multiple) * multiple) for side in (height, width))
            raise BadInput(
                f"an image of {width}x{height} pixels: sides of this model are multiples of {multiple}",
                hint=f"{near[1]}x{near[0]}",
            )
        return height, width

    def checked_frames(self, frames: int) -> int:
        """The number of latent frames for a video of `frames` frames.

        Raises:
            BadInput: the model draws images only, or the number does not fit its autoencoder.
        """
        if not self.frame_factor:
            raise BadInput(f"frames = {frames}: this model draws images alone", hint="leave out `frames`")
        return latent_frames(frames, self.frame_factor)

    def plan(
        self, sampler: SamplerSettings, steps: int, size: tuple[int, int], strength: float = 1.0, frames: int = 1
    ) -> SamplingPlan:
        """The sampling plan for images of this size in pixels, or for videos with `frames` latent frames.

        Args:
            strength: the share of the steps that are run.

        Raises:
            BadInput: the sampler does not fit the model or the number of steps.
        """
        if sampler.prediction != self.config.prediction:
            problem = f"sampler.prediction = {sampler.prediction}: this model predicts {self.config.prediction}"
            raise BadInput(problem, hint="a sampler with the model's own prediction")
        if "interval" in self.config.conditions and sampler.name != "euler":
            problem = f"sampler.name = {sampler.name}: this model predicts mean velocities over steps, which Euler's method takes"
            raise BadInput(problem, hint="sampler.name=euler")
        if steps < 1:
            raise BadInput(f"steps = {steps}: at least 1")
        multiple = self.factor * self.config.size_multiple
        positions = frames * (size[0] // multiple) * (size[1] // multiple)
        return SAMPLERS[sampler.name](sampler, steps, positions=positions, strength=strength)

    def conditions(
        self, texts: Sequence[str], negatives: Sequence[str | None], scale: float
    ) -> tuple[Conditions, Conditions | None]:
        """Encodes prompts and negative prompts to conditions. The latter are None if there is no classifier-free guidance.

        Args:
            negatives: a negative prompt for each prompt, or None.
            scale: the guidance scale.

        Raises:
            BadInput: a negative prompt is given, but the model takes the guidance scale as an input.
        """
        conditions = self.prompts.encode(texts)
        if "guidance" in self.config.conditions:
            if any(negatives):
                problem = "negative prompts have no effect: this model takes the scale of guidance as an input"
                raise BadInput(problem, hint="leave out `negative`")
            return conditions._replace(guidance=jnp.full(len(texts), scale, jnp.float32)), None
        # For a model that was distilled without guidance, only a negative prompt has an effect.
        if scale == 1 or (self.config.distilled and not any(negatives)):
            return conditions, None
        if all(text is None for text in negatives):
            return conditions, self.prompts.null(len(texts))
        return conditions, self.prompts.encode([text or "" for text in negatives])

    def finished(self, latents: Any) -> np.ndarray:
        """Checks and decodes latents that were drawn, to images [B H W 3] in 0..1.

        Raises:
            ArgosyError: the latents or the images are not finite.
        """
        check_finite("the denoiser", latents)
        return self.decode(latents)

    def draw(
        self, drawing: Drawing, progress: Callable[[int, int], None] | None = None, cached: CacheReport | None = None
    ) -> np.ndarray:
        """Draws the latents [B H W C] of a batch.

        Args:
            progress: called after each evaluation with the number done and of all evaluations.
            cached: counts the evaluations; changed in place.

        Raises:
            ArgosyError: the conditions or the latents are not finite.
        """
        size, run = len(drawing), self.sampling(drawing)
        if progress is None:
            latents = run.at_once()
        else:
            for done in range(run.evaluations):
                run.step(done)
                progress(done + 1, run.evaluations)
            latents = run.latents()
        latents = np.asarray(latents)[:size]
        check_finite("the denoiser", latents)
        if cached is not None:
            cached.count(run.evaluations, run.layer_runs)
        return latents

    def control(
        self,
        image: Any,
        count: int,
        size: tuple[int, int],
        scale: float | Sequence[float],
        guess_mode: bool,
        mode: int | Sequence[int | None] | None = None,
    ) -> Control | None:
        """Prepares the inputs of the ControlNets from arguments of `images`; None if the pipeline has no ControlNet.

        Args:
            image: the argument `control_image`.
            count: number of images to draw.
            size: height and width in pixels.

        Raises:
            BadInput: control images do not fit, there is no ControlNet for them, or a ControlNet has none.
        """
        nets = self.controlnets
        if not nets:
            if image is not None:
                raise BadInput("a control image without a ControlNet", hint="argosy.load(FOLDER, controlnet=FOLDER)")
            return None
        if image is None:
            raise BadInput("this pipeline has a ControlNet, and there is no image that it follows", hint="control_image=")
        if len(nets) > 1 and not isinstance(image, list | tuple):
            raise BadInput(f"control_image: one for each of {len(nets)} ControlNets", hint="control_image=[edges, depths]")
        check_patches([net.config for net in nets], size, self.factor)
        images = []
        for i, pictures in enumerate(for_each("control_image", image, len(nets)) if len(nets) > 1 else [image]):
            control = given_images(pictures, f"control_image{net_suffix(i, len(nets))}", count, size)
            if nets[i].config.reads_latents:
                autoencoder = None if self._autoencoder is None else self._autoencoder.config
                control = remove_shift(nets[i].config, autoencoder, self.encode(control))
            images.append(np.repeat(control, count // len(control), 0))
        scales, modes = for_each("control_scale", scale, len(nets)), for_each("control_mode", mode, len(nets))
        return control_of([net.config for net in nets], images, scales, guess_mode, modes)

    def warm_up(self, batch: int, step_cache: float | None = None) -> None:
        """Compiles the programs that generate `batch` images of the default size with one call per sampling step."""
        height, width = (side // self.factor for side in self.defaults.size)
        null, scale = self.prompts.null(batch), np.full(batch, self.defaults.guidance, np.float32)
        learned = "guidance" in self.config.conditions
        conditions = null._replace(guidance=jnp.asarray(scale)) if learned else null
        plan = self.plan(self.sampler, self.defaults.steps, self.defaults.size)
        shape, seeds = (height, width, self.config.channels), [(0, i) for i in range(batch)]
        away = None if learned or self.defaults.guidance == 1 else null
        if self.controlnets:
            blank = [np.zeros((1, *self.defaults.size, 3), np.float32)] * len(self.controlnets)
            modes = [0 if getattr(net.config, "modes", None) else None for net in self.controlnets]
            control = self.control(blank if len(blank) > 1 else blank[0], batch, self.defaults.size, 1.0, False, modes)
            assert control is not None
            conditions, away = control.put_on(conditions, away, slice(None))
        run = self.sampling(Drawing(plan, seeds, scale, conditions, away, shape, cache_threshold=step_cache))
        run.step(0)
        self.decode(run.latents()[:batch])

    def sampling(self, drawing: Drawing) -> SamplingRun:
        """Starts to sample a batch, which is padded to a size that programs are compiled for.

        Raises:
            ArgosyError: the conditions are not finite.
        """
        check_finite("the prompts' encoding", drawing.conditions, drawing.null)
        return SamplingRun(self._graph, self._leaves, padded_drawing(drawing), self.guidance, self.say)

    def decode(self, latents: Any) -> np.ndarray:
        """Decodes latents [B H W C] to images [B H W 3] in 0..1, or latents with frames to videos.

        Raises:
            ArgosyError: the images are not finite.
        """
        if self._autoencoder is not None:
            return in_color(self._autoencoder.decode(latents))
        images = np.asarray(latents, np.float32)
        check_finite("the denoiser", images)
        return in_color(np.clip(images / 2 + 0.5, 0, 1))

    def export(self, folder: str | Path, **options: Any) -> Any:
        """Writes the pipeline as a bundle, which draws without the model's source code (`argosy export`). Returns the bundle's
        manifest.

        Args:
            options: steps, size, platforms, batch, store, sign, as in `export.images.export_images`.

        Raises:
            BadInput: the model cannot draw this size in so many steps, the folder exists, or the model is not from `argosy.load`.
        """
        if self.exporter is None:
            raise BadInput("this model was not loaded by argosy.load", hint="argosy.load(FOLDER).export(OUT)")
        return self.exporter(self, folder, **options)

    def encode(self, images: Any) -> np.ndarray:
        """Encodes images [B H W 3] in 0..1 to latents [B h w C]. If the encoder returns a distribution, the latents are its mean."""
        channels = self.config.channels if self._autoencoder is None else self._autoencoder.config.channels
        images = np.asarray(images, np.float32)
        images = images.mean(-1, keepdims=True) if channels == 1 else images
        if self._autoencoder is None:
            return images * 2 - 1
        encode, parts = self._autoencoder.encode, range(0, len(images), ENCODED_TOGETHER)
        return np.concatenate([encode(images[at : at + ENCODED_TOGETHER]) for at in parts])

    def _given_noise(self, latents: Any, count: int, shape: tuple[int, ...]) -> np.ndarray:
        noise = np.asarray(latents, np.float32)
        expected = (count, shape[-1], *shape[:-1])
        if noise.shape != expected:
            raise BadInput(f"latents of {list(noise.shape)}: [N C {'F ' * (len(shape) - 3)}H W] is {list(expected)} here")
        return np.moveaxis(noise, 1, -1)

    def encode_given(self, image: Any, mask: Any, count: int, size: tuple[int, int]) -> tuple[Any, Any]:
        """Encodes the arguments `image` and `mask` of `images` to latents [count h w C] and a mask [count h w 1] over them; None for
        each that is not given.

        Args:
            count: number of images to draw.
            size: height and width in pixels.

        Raises:
            BadInput: a shape does not fit, or a mask is given without an image.
        """
        if image is None:
            if mask is not None:
                raise BadInput("a mask without an image", hint="image=, which it is about")
            return None, None
        pixels = given_images(image, "image", count, size)
        latents = np.repeat(self.encode(pixels), count // len(pixels), 0)
        if mask is None:
            return latents, None
        free = np.asarray(mask, np.float32)
        free = free[None] if free.ndim == 2 else free
        if free.shape[1:] != size or count % len(free):
            raise BadInput(f"mask of {list(free.shape)}: [N H W] is {[count, *size]} here")
        free = np.repeat(free, count // len(free), 0)
        f = self.factor
        # A latent is redrawn if any of its pixels is.
        blocks = free.reshape(len(free), size[0] // f, f, size[1] // f, f)
        return latents, blocks.max((2, 4))[..., None]
