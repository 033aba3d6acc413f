"""Draws images during training, as grids in the run's folder `samples/` and in the report.

A denoiser draws classes or prompts, from the same noise every time, so that grids can be compared. If the run averages its weights,
there are two grids, because the average lags behind: early in a run the average still draws noise while the trained weights already
draw images. An autoencoder draws held-out images and their reconstructions. A ControlNet draws control images and the images that they
steer. A learned token is drawn by prompts that contain it.
"""

from typing import Any

import numpy as np

from argosy.core.errors import BadInput
from argosy.core.formats.png import image_grid, png_bytes
from argosy.core.storage import Store
from argosy.infer.denoise.autoencoder import ImageAutoencoder
from argosy.infer.denoise.encoders import autoencoder_factor, pipeline_around
from argosy.infer.denoise.folder import load_diffusers
from argosy.infer.denoise.learned import LearnedToken
from argosy.infer.denoise.pictures import as_uint8, in_color
from argosy.infer.denoise.pipeline import ImageDefaults
from argosy.infer.denoise.runs import pipeline_of
from argosy.models.autoencoders.base import AutoencoderConfig
from argosy.models.diffusion.controlnets.base import ControlNetSettings
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.models.parts.weight import merge
from argosy.observe.metrics import Metrics
from argosy.run.assembly.assembly import Assembly
from argosy.run.hooks.periodic import is_stopping
from argosy.run.settings.run import Run
from argosy.run.view import View
from argosy.train.objectives.images.controlnet import STEERED
from argosy.train.objectives.images.textual_inversion import UNET
from argosy.train.step import model_for

FOLDER = "samples"


class ImageSamplingHook:
    """Draws a grid of images with the current weights, and logs the path of the grid."""

    def __init__(self, assembly: Assembly, settings: Run, metrics: Metrics, view: View, store: Store):
        self.assembly, self.settings, self.metrics, self.view, self.store = assembly, settings, metrics, view, store
        autoencodes = isinstance(settings.model, AutoencoderConfig)
        steers, learns = (isinstance(settings.model, kind) for kind in (ControlNetSettings, LearnedEmbeddingsConfig))
        kind = Reconstructions if autoencodes else SteeredDrawings if steers else LearnedDrawings if learns else Drawings
        self.grid: Any = kind(assembly)

    def __call__(self, now: Any) -> None:
        if is_stopping(now, self.assembly.steps):
            return
        state = now.state
        weight_sets = {"": state.inference_params} | ({"-raw": state.params} if state.is_averaged else {})
        count = 0
        for end, params in weight_sets.items():
            name = f"{FOLDER}/{now.step:08d}{end}.png"
            module = merge(self.assembly.graph, params | state.rest)
            module.dtype = self.assembly.decided.dtype
            images = self.grid.draw(module)
            count = len(images)
            self.store.write_bytes(name, png_bytes(image_grid(images, self.grid.columns)))
            kind = "weights" if end or not state.is_averaged else "average of the weights"
            self.metrics.write({"step": now.step, "sample_image": name, "of": kind})
        self.view.say(f"step {now.step}: {count} images in {FOLDER}/{now.step:08d}.png")


class Drawings:
    """Draws classes or prompts in turn, or the empty prompt for a model that reads neither."""

    def __init__(self, assembly: Assembly):
        self.assembly, run = assembly, assembly.run
        sizes, factor = assembly.batches.sizes, autoencoder_factor(run.encoders)
        self.size = factor * sizes["h"], factor * sizes["w"]
        texts = assembly.prompts.texts if assembly.prompts else tuple(map(str, range(run.model.classes_known))) or ("",)
        self.columns = min(len(texts), 10) if len(texts) > 1 else 8
        self.prompts = [texts[i % len(texts)] for i in range(run.sample.images)]

    def draw(self, module: Any) -> np.ndarray:
        """Draws the images of the grid with these weights, uint8 [N H W 3]."""
        run = self.assembly.run
        # The autoencoder is read for each grid: in between, its memory is the training's.
        more: Any = {"prompts": self.assembly.prompts, "dtype": self.assembly.decided.dtype}
        pipeline = pipeline_of(module, run.objective, vars(run.sample), run.encoders, self.size, **more)
        return pipeline.images(self.prompts, seed=[run.seed + i for i in range(len(self.prompts))], batch=64)


class SteeredDrawings:
    """Draws control images, and below each the image that is generated from it. The prompts are the captions of the control images, or
    the prompts of the settings in turn."""

    def __init__(self, assembly: Assembly):
        self.assembly, run, prompts = assembly, assembly.run, assembly.prompts
        assert prompts is not None
        assert prompts.controls is not None
        texts = run.sample.prompts or prompts.captions
        self.columns = min(run.sample.images, 10)
        self.prompts = [texts[i % len(texts)] for i in range(self.columns)]
        self.controls = prompts.controls[np.arange(self.columns) % len(prompts.controls)]

    def draw(self, module: Any) -> np.ndarray:
        """Draws the images of the grid with these weights, uint8 [N H W 3]."""
        a, run, size = self.assembly, self.assembly.run, self.controls.shape[1:3]
        denoiser = model_for(a.roles[STEERED].graph, a.decided.precision, a.frozen[STEERED])
        options: Any = {"prompts": a.prompts, "dtype": a.decided.dtype, "controlnets": [module]}
        options["defaults"] = ImageDefaults(run.sample.steps, run.sample.guidance, size)
        pipeline = pipeline_around(denoiser, run.encoders, **options)
        seeds = [run.seed + i for i in range(self.columns)]
        images = pipeline.images(self.prompts, seed=seeds, batch=64, control_image=self.controls)
        return np.concatenate([as_uint8(self.controls), images])


class LearnedDrawings:
    """Draws prompts that contain a learned token: the prompts of the settings in turn, or the first templates of the data.

    Raises:
        BadInput: a prompt of the settings does not contain the token.
    """

    def __init__(self, assembly: Assembly):
        self.assembly, run = assembly, assembly.run
        token, sizes, factor = run.model.token, assembly.batches.sizes, autoencoder_factor(run.encoders)
        self.size = factor * sizes["h"], factor * sizes["w"]
        if missing := [text for text in run.sample.prompts if token.lower() not in text.lower()]:
            raise BadInput(f"sample.prompts: {missing[0]!r} does not name the token {token}", hint=f"a photo of a {token}")
        texts = run.sample.prompts or [template.format(token) for template in run.objective.prompts]
        self.columns = min(run.sample.images, 10)
        self.prompts = [texts[i % len(texts)] for i in range(run.sample.images)]

    def draw(self, module: Any) -> np.ndarray:
        """Draws the images of the grid with these weights, uint8 [N H W 3]."""
        a, run = self.assembly, self.assembly.run
        unet = model_for(a.roles[UNET].graph, a.decided.precision, a.frozen[UNET])
        rows = [np.asarray(module.rows(name)) for name in run.model.encoders]
        options: Any = {"dtype": a.decided.dtype, "denoiser": unet, "embeddings": LearnedToken(run.model.token, rows)}
        # Encoders and autoencoder are read for each grid: in between, their memory is the training's.
        pipeline = load_diffusers(str(run.encoders.pipeline), **options)
        seeds = [run.seed + i for i in range(len(self.prompts))]
        drawing: Any = {"steps": run.sample.steps, "guidance": run.sample.guidance, "size": self.size}
        return pipeline.images(self.prompts, seed=seeds, batch=64, **drawing)


class Reconstructions:
    """Draws held-out images, and below each its reconstruction by the autoencoder.

    Raises:
        BadInput: there are no held-out images.
    """

    def __init__(self, assembly: Assembly):
        batches = assembly.evals
        if batches is None:
            problem = "sample.every draws held-out images of an autoencoder, and none are held out"
            raise BadInput(problem, hint="data.held_out=0.05 and eval.batches=1, or leave sample.every out")
        batches.rewind()
        self.images = np.asarray(next(iter(batches))["images"])[: min(max(assembly.run.sample.images // 2, 1), 10)]
        self.columns = len(self.images)
        batches.rewind()

    def draw(self, module: Any) -> np.ndarray:
        """Draws the images of the grid with these weights, uint8 [N H W 3]."""
        before = self.images / 2 + 0.5
        autoencoder = ImageAutoencoder(module)
        return as_uint8(in_color(np.concatenate([before, autoencoder.decode(autoencoder.encode(before))])))
