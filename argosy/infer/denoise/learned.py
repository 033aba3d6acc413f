"""Reads learned embeddings (textual inversion) for a pipeline, from files, from runs, or from memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from argosy.checkpoint.open import open_model
from argosy.checkpoint.run_directory import CHECKPOINTS
from argosy.checkpoint.step.layout import META
from argosy.core.errors import BadInput
from argosy.infer.denoise.prompts import prompt_length
from argosy.models.diffusion.learned_embeddings import ENCODERS, LearnedEmbeddingsConfig
from argosy.models.diffusion.unet import UNetConfig
from argosy.weights.hub.learned_embeddings import LearnedRows, add_learned_rows, read_learned_embeddings


@dataclass(frozen=True)
class LearnedToken:
    """A token with learned embeddings.

    token: the token's name in prompts.
    rows: the embeddings [n D] for each text encoder, in the order of the encoders.
    """

    token: str
    rows: Sequence[np.ndarray]


def learned_rows(tokens: Sequence[str | Path | LearnedToken], widths: Sequence[int]) -> list[LearnedRows]:
    """Reads learned tokens. Returns, for each text encoder, the embeddings of each token.

    Args:
        tokens: files, folders with one, runs and checkpoints of `argosy train textual_inversion`, or `LearnedToken`s.
        widths: the embedding width of each text encoder, in the order of the encoders.

    Raises:
        BadInput, Damaged: as `read_learned_embeddings`, or a run trained something else.
    """
    rows: list[LearnedRows] = [{} for _ in widths]
    for source in tokens:
        if not isinstance(source, LearnedToken) and not _is_run(source):
            read_learned_embeddings(source, widths, rows)
            continue
        token, where = (source, source.token) if isinstance(source, LearnedToken) else (trained_token(source), str(source))
        add_learned_rows(rows, token.token, dict(enumerate(token.rows)), widths, where)
    return rows


def _is_run(path: str | Path) -> bool:
    """Whether a folder is a run or a checkpoint. If a run also has a file of embeddings, its newest checkpoint is read, which is
    newer."""
    return (Path(path) / CHECKPOINTS).is_dir() or (Path(path) / META).is_file()


def trained_token(path: str | Path) -> LearnedToken:
    """Reads the token that a run trained, at its last good checkpoint, or at one checkpoint.

    Raises:
        BadInput, Damaged: there is no good checkpoint, or the run trained something else.
    """
    stored = open_model(path)
    if not isinstance(stored.config, LearnedEmbeddingsConfig):
        problem = f"embeddings={path}: the run trained a model, and no learned embeddings"
        raise BadInput(problem, hint="a run of `argosy train textual_inversion`, or a file learned_embeds.safetensors")
    rows = [np.asarray(stored.weights.read(name), np.float32) for name in stored.config.encoders]
    return LearnedToken(stored.config.token, rows)


def learned_layer(pipeline: Path, unet: UNetConfig) -> dict[str, Any]:
    """The settings to be merged for `argosy train textual_inversion model=FOLDER`: those of the learned embeddings, except the token.

    Args:
        pipeline: the diffusers folder.
        unet: the settings of its denoiser.
    """
    encoders: list[Any] = [open_model(pipeline / name) for name in ENCODERS if (pipeline / name).is_dir()]
    tokens = prompt_length(pipeline / "tokenizer", encoders[0].config.context)
    sizes = {"channels": unet.channels, "multiple": unet.size_multiple, "text_tokens": tokens}
    return {"widths": [encoder.config.width for encoder in encoders]} | sizes
