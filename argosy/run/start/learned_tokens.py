"""Initializes a learned token (textual inversion) with the embeddings of a word in its text encoders, and encodes its prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from argosy.checkpoint.open import open_model
from argosy.core.counts import plural
from argosy.core.errors import BadInput
from argosy.data.tokenizers.load import load_tokenizer
from argosy.infer.denoise.prompts import EMBEDDING, PromptTokens, prompt_length
from argosy.models.diffusion.learned_embeddings import LearnedEmbeddingsConfig
from argosy.models.parts.weight import put
from argosy.parallel.place import on_devices


def prompt_tokens(model: LearnedEmbeddingsConfig, pipeline: str) -> Iterator[tuple[Path, Any, PromptTokens]]:
    """Yields each text encoder of a diffusers folder: its folder, the opened model, and the encoder of prompts that contain the token.

    Raises:
        BadInput, Damaged: a tokenizer is missing, or its vocabulary has the token already.
    """
    for name in model.encoders:
        folder = Path(pipeline) / name
        opened: Any = open_model(folder)
        tokenizer = Path(pipeline) / name.replace("text_encoder", "tokenizer")
        length = prompt_length(tokenizer, opened.config.context)
        yield folder, opened, PromptTokens(opened.config, load_tokenizer(tokenizer), length, name, None, {model.token: model.vectors})


def template_ids(model: LearnedEmbeddingsConfig, objective: Any, pipeline: str) -> np.ndarray:
    """Encodes the empty prompt and all prompt templates for each text encoder. Returns ids [P n t].

    Raises:
        BadInput: as `prompt_tokens`; the name of the token contains a special token; the encoders read prompts of different lengths; or
            a prompt is so long that the token is cut off.
    """
    texts, all_ids = ["", *(template.format(model.token) for template in objective.prompts)], []
    for folder, _, tokens in prompt_tokens(model, pipeline):
        if tokens.length != model.text_tokens:
            problem = f"{folder} reads {plural(tokens.length, 'token')}, and model.text_tokens = {model.text_tokens}"
            raise BadInput(problem, hint="text encoders that read prompts of several lengths are not built")
        if inner := [name for name in tokens.tokenizer.special.values() if name.lower() in model.token.lower()]:
            problem = f"model.token = {model.token!r} has {inner[0]!r} in it, a special token of {folder}, "
            problem += "at which other programs part it"
            raise BadInput(problem, hint="another name")
        learned_ids = set(tokens.learned[model.token.lower()])
        ids = tokens.ids(texts)
        if cut := [text for text, row in zip(texts[1:], ids[1:], strict=True) if not learned_ids <= set(row.tolist())]:
            raise BadInput(f"a prompt of {plural(tokens.length, 'token')} loses the learned ones: {cut[0]!r}", hint="a shorter prompt")
        all_ids.append(ids)
    initial_ids(model, objective, pipeline)
    return np.stack(all_ids, 1)


def initial_ids(model: LearnedEmbeddingsConfig, objective: Any, pipeline: str) -> list[int]:
    """Returns the id of the word that initializes the token, for each text encoder.

    Raises:
        BadInput: the word is not a single token.
    """
    all_ids = []
    for folder, _, tokens in prompt_tokens(model, pipeline):
        (ids,) = tokens.encoded([objective.initializer])
        if len(ids) != 1:
            problem = f"objective.initializer = {objective.initializer!r} is {plural(len(ids), 'token')} of {folder}, and one is needed"
            raise BadInput(problem, hint="a common word in its singular, such as toy")
        all_ids += ids
    return all_ids


def put_first_rows(assembly: Any) -> None:
    """Writes the embedding of `objective.initializer` into all embeddings of the learned token, in place."""
    run, places = assembly.run, assembly.places.params | assembly.places.rest
    ids = initial_ids(run.model, run.objective, str(run.encoders.pipeline))
    for (folder, opened, _), number in zip(prompt_tokens(run.model, str(run.encoders.pipeline)), ids, strict=True):
        row = np.asarray(opened.weights.read(EMBEDDING), np.float32)[number]
        put(assembly.model, {folder.name: on_devices(np.tile(row, (run.model.vectors, 1)), places[folder.name])})
