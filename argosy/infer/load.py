"""Loads an `LM` from a MODEL argument. `weights.build` builds its config, module and tokenizer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from argosy.adapt.rules import Rule
from argosy.checkpoint.open import open_model
from argosy.core.errors import BadInput
from argosy.infer.cpu.panels import block_forms
from argosy.infer.lm import LM
from argosy.infer.settings import EngineSettings
from argosy.models.base.language import LanguageConfig
from argosy.models.diffusion.base import DenoiserConfig
from argosy.models.parts.stack import Execution
from argosy.models.vgg import USE
from argosy.ops.native import library
from argosy.weights import build
from argosy.weights.model import OpenedModel

DEFAULT = EngineSettings()


def load_lm(
    path: str | Path,
    *,
    dtype: Any = None,
    run: Execution | None = None,
    adapter: str | Path | None = None,
    context: int | None = None,
    tensor: int = 1,
    warn: Callable[[str], None] = lambda _: None,
    engine: EngineSettings = DEFAULT,
    draft: LM | None = None,
    blocks: bool = False,
    rules: Sequence[Rule] | None = None,
) -> LM:
    """Loads a language model from a Hub folder, a GGUF file, a run directory or one checkpoint. Arguments and errors are those of
    `weights.build.load_model`; models of images are refused.

    Args:
        engine: settings of the engine under `generate`.
        draft: the draft model, if the engine's settings ask for one.
        blocks: whether to keep the weights of a GGUF file in its quantized blocks (`panels.block_forms`), on a CPU with kernels for
            them. Such a model can generate and score, but not be trained, changed or saved.
    """
    forms = block_forms if blocks and jax.default_backend() == "cpu" and not library.load() else None
    options: Any = {"dtype": dtype, "run": run, "adapter": adapter, "context": context, "tensor": tensor}
    options |= {"forms": forms, "rules": rules}
    stored = open_model(path, warn)
    _check_reads_text(stored)
    return LM(**vars(build.load_model(stored, **options)), engine_settings=engine, draft=draft)


def _check_reads_text(stored: OpenedModel) -> None:
    """Checks that a model is none of images, such as a denoiser or a VGG in a file of its own.

    Raises:
        BadInput: it is one; says what it is for.
    """
    if stored.config.inputs != "images":
        return
    if isinstance(stored.config, DenoiserConfig):
        hint = f"with a diffusers folder: argosy generate FOLDER PROMPT image=out.png single_file={stored.path}"
        raise BadInput(f"{stored.path} is a denoiser alone, which draws nothing without text encoders and an autoencoder", hint=hint)
    raise BadInput(f"{stored.path} is a net of features, which reads images and no text", hint=USE)


def random_lm(
    config: LanguageConfig,
    seed: int,
    *,
    dtype: Any = None,
    run: Execution | None = None,
    engine: EngineSettings = DEFAULT,
    draft: LM | None = None,
) -> LM:
    """A language model with random weights and no tokenizer. Arguments are those of `load_lm`."""
    return LM(**vars(build.random_model(config, seed, dtype=dtype, run=run)), engine_settings=engine, draft=draft)
