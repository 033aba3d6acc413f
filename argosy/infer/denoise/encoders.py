"""The frozen models around a denoiser: the autoencoder, and the text encoders.

Before the first step of a run they encode the images and captions of its data (`RunEncoders`). Together with the denoiser that the run
trained, they form a pipeline that draws images (`pipeline_around`).
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from argosy.checkpoint.base import files_of
from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput
from argosy.core.progress import Say
from argosy.infer.denoise.control import remove_shift
from argosy.infer.denoise.encoder_settings import EncoderSettings
from argosy.infer.denoise.folder import DENOISERS, INDEX, load_diffusers
from argosy.infer.denoise.pipeline import ImageDefaults, ImagePipeline, PromptEncoder
from argosy.infer.denoise.prompts import PromptReader, TextPrompts
from argosy.infer.denoise.settings import SamplerSettings
from argosy.infer.denoise.trained_parts import open_denoiser, open_unet
from argosy.models.autoencoders.base import AutoencoderConfig
from argosy.models.diffusion.base import Conditions, ImageSpace
from argosy.models.diffusion.controlnets.base import ControlNetSettings
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.weights.build import load_model, stored_tokenizer
from argosy.weights.hub.config import read_json_object
from argosy.weights.manifest import hash_file


class RunEncoders:
    """The encoders of a run, with the interface that its data uses.

    Args:
        config: the settings of the trained model: the denoiser, a ControlNet, or learned embeddings.
        dtype: the type of the encoders' weights and activations.
        say: called with a warning if a caption is truncated.
    """

    def __init__(self, settings: EncoderSettings, config: Any, dtype: Any, say: Say | None = None):
        self.settings, self.config, self.dtype, self.say = settings, config, dtype, say
        self._pipeline: ImagePipeline | None = None
        self._identity: str | None = None

    @property
    def reads_text(self) -> bool:
        return self.settings.reads_text and "text" in self.config.conditions

    @property
    def space(self) -> ImageSpace | None:
        folder = autoencoder_folder(self.settings)
        if folder is None:
            return None
        config: Any = open_model(folder).config
        return ImageSpace(config.channels, config.factor, 0)

    @property
    def encodes_controls(self) -> bool:
        """Whether control images are encoded by the autoencoder."""
        return isinstance(self.config, ControlNetSettings) and self.config.reads_latents

    @property
    def identity(self) -> str:
        """A hash of all files of weights and tokenizers, and of the dtype. Files may have tens of GB, so they are read only once."""
        if self._identity is None:
            self._identity = self._hashed()
        return self._identity

    def _hashed(self) -> str:
        described = ["with text_mask", str(jnp.dtype(self.dtype)), self.settings.text_tokens if self.settings.text else None]
        if self.encodes_controls and getattr(self.config, "zero_pooled", False):
            described.append("control images without shift")
        for folder in encoder_folders(self.settings):
            names = sorted({*files_of(open_model(folder)), *folder.glob("*.json")})
            described.append({path.name: hash_file(path) for path in names})
        for folder in tokenizer_folders(self.settings):
            described.append({path.name: hash_file(path) for path in sorted(folder.iterdir()) if path.is_file()})
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def latents(self, images: np.ndarray) -> np.ndarray:
        return self._opened().encode((images + 1) / 2)

    def control_latents(self, images: np.ndarray) -> np.ndarray:
        """Encodes control images [B H W 3] in 0..1 to latents, as the trained ControlNet reads them."""
        pipe = self._opened()
        return remove_shift(self.config, None if pipe.autoencoder is None else pipe.autoencoder.config, pipe.encode(images))

    def states(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        encoded = self._opened().prompts.encode(texts)
        # Models that read no pooled vector get zeros [B 1].
        pooled = np.zeros((len(texts), 1), np.float32) if encoded.pooled is None else np.asarray(encoded.pooled)
        text = np.asarray(encoded.text)
        mask = np.ones(text.shape[:2], np.int32) if encoded.text_mask is None else np.asarray(encoded.text_mask, np.int32)
        return {"text": text, "text_mask": mask, "pooled": pooled}

    def release(self) -> None:
        """Frees the models. They are loaded again at the next use."""
        self._pipeline = None

    def _opened(self) -> ImagePipeline:
        if self._pipeline is None:
            # The denoiser has no weights here, because nothing is drawn with it.
            folder, config = str(self.settings.pipeline), self.config
            if isinstance(config, ControlNetSettings):
                config = open_denoiser(folder)[2]
            elif isinstance(config, LearnedEmbeddingsConfig):
                config = open_unet(folder)[1]
            # Text encoders are loaded only if there are captions.
            prompts = None if self.reads_text or self.settings.text else NoPrompts()
            self._pipeline = pipeline_around(config.build(), self.settings, prompts=prompts, dtype=self.dtype, say=self.say)
        return self._pipeline


def pipeline_around(
    denoiser: Any,
    settings: EncoderSettings,
    *,
    sampler: SamplerSettings | None = None,
    prompts: PromptEncoder | None = None,
    defaults: ImageDefaults | None = None,
    dtype: Any = None,
    say: Say | None = None,
    controlnets: Sequence[Any] = (),
) -> ImagePipeline:
    """Builds the pipeline of a denoiser with the encoders of `settings`.

    Args:
        denoiser: the module of the denoiser.
        sampler: the sampler, if `settings` names no pipeline; otherwise the pipeline's sampler is used.
        prompts: converts prompts to conditions in place of the text encoders, which are then not loaded.
        defaults: default arguments of `images`, in place of those of the pipeline's folder.
        dtype: the type of the encoders' weights and activations.
        controlnets: the modules of ControlNets, which steer the denoiser.

    Raises:
        BadInput, Damaged: as `load_diffusers`, or a named model is of another kind.
    """
    autoencoder, writer, given_prompts = None, None, prompts
    if settings.pipeline is not None:
        texts = prompts is None and settings.text is None
        pipe = load_diffusers(settings.pipeline, dtype=dtype, denoiser=denoiser, texts=texts, say=say)
        prompts, sampler, autoencoder, writer = prompts or pipe.prompts, pipe.sampler, pipe.autoencoder, pipe.writer
        defaults = defaults or pipe.defaults
    if settings.autoencoder is not None:
        autoencoder, writer = load_model(_opened_autoencoder(settings.autoencoder), dtype=dtype).module, None
    if settings.text is not None and given_prompts is None:
        prompts, writer = TextPrompts([text_reader(settings.text, settings.text_tokens, dtype, say)]), None
    pipeline = ImagePipeline(
        denoiser,
        prompts or NoPrompts(),
        sampler or SamplerSettings(),
        defaults or ImageDefaults(1, 1.0, (denoiser.config.size_multiple,) * 2),
        autoencoder,
        say=say,
        controlnets=controlnets,
    )
    pipeline.writer = writer
    return pipeline


def autoencoder_factor(settings: EncoderSettings) -> int:
    """The ratio of an image's height and width to those of the denoiser's input."""
    folder = autoencoder_folder(settings)
    config: Any = None if folder is None else open_model(folder).config
    return 1 if config is None else config.factor


class NoPrompts:
    """The prompts of a pipeline that only encodes images."""

    def encode(self, texts: Sequence[str]) -> Conditions:
        return Conditions()

    def null(self, count: int) -> Conditions:
        return Conditions()


def text_reader(folder: str, tokens: int, dtype: Any, say: Say | None) -> PromptReader:
    """Loads a text encoder with its tokenizer.

    Args:
        tokens: number of tokens that texts are padded or truncated to, at most the encoder's context.

    Raises:
        BadInput: the model is no text encoder, or has no tokenizer.
    """
    opened = open_model(folder)
    if getattr(opened.config, "causal", True) and not hasattr(opened.config, "framing"):
        raise BadInput(f"encoders.text={folder} is no text encoder", hint="a folder of BERT, CLIP or T5")
    tokenizer = stored_tokenizer(opened)
    if tokenizer is None:
        raise BadInput(f"encoders.text={folder} has no tokenizer", hint="copy tokenizer.json beside its weights")
    length = min(tokens, opened.config.context)
    return PromptReader(load_model(opened, dtype=dtype).module, tokenizer, length, "encoders.text", say)


def _opened_autoencoder(folder: str) -> Any:
    opened = open_model(folder)
    if not isinstance(opened.config, AutoencoderConfig):
        problem = f"encoders.autoencoder={folder} is no autoencoder"
        raise BadInput(problem, hint="a folder of AutoencoderKL or AutoencoderTiny, or a run of `argosy train vae`")
    return opened


def autoencoder_folder(settings: EncoderSettings) -> Path | None:
    """The folder of the autoencoder; None: there is none."""
    if settings.autoencoder is not None:
        return _opened_autoencoder(settings.autoencoder).path
    return None if settings.pipeline is None else _pipeline_folder(settings.pipeline) / "vae"


def encoder_folders(settings: EncoderSettings) -> list[Path]:
    """The folders of all encoders."""
    folders = [autoencoder_folder(settings)]
    if settings.text is not None:
        folders.append(open_model(settings.text).path)
    elif settings.pipeline is not None:
        folders += _parts(settings.pipeline, "text_encoder")
    return [folder for folder in folders if folder is not None]


def tokenizer_folders(settings: EncoderSettings) -> list[Path]:
    """The folders of a pipeline's tokenizers. Tokenizers of other text encoders are in the folders of their weights."""
    if settings.text is not None or settings.pipeline is None:
        return []
    return _parts(settings.pipeline, "tokenizer")


def _parts(pipeline: str, kind: str) -> list[Path]:
    path = _pipeline_folder(pipeline)
    names = [name for name in read_json_object(path / INDEX) if name.startswith(kind) and name not in DENOISERS]
    return [path / name for name in sorted(names) if (path / name).is_dir()]


def _pipeline_folder(pipeline: str) -> Path:
    path = Path(pipeline)
    if not (path / INDEX).is_file():
        raise BadInput(f"encoders.pipeline={pipeline} is no diffusers folder", hint="a folder with a model_index.json")
    return path
