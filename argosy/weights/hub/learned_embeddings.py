"""Reads and writes learned embeddings of new tokens (textual inversion, Gal et al. 2022, arXiv:2208.01618).

    {"<cat-toy>": [D] or [n D]}              diffusers' learned_embeds.safetensors, for the first text encoder
    {"emb_params": [n D]}                    AUTOMATIC1111's format. The token is the name of the file
    {"clip_l": [n D], "clip_g": [n E]}       Stable Diffusion XL, for both encoders. The token is in the metadata, or the file's name

In a prompt, a new token stands for its n embeddings. A file with embeddings of the second encoder of XL alone is recognized by their
width. An encoder without embeddings of a token reads the token as text, as in diffusers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from argosy.core.errors import BadInput
from argosy.core.formats import TensorEntry, TensorReader
from argosy.core.formats.files import File
from argosy.core.formats.safetensors import SafeTensors, tensors_file

FILE = "learned_embeds.safetensors"
UNNAMED = "emb_params"
OF_XL = ("clip_l", "clip_g")
# The key of the metadata that holds the token, in files whose tensors are named by encoder.
TOKEN = "token"
# The embeddings of each new token for one text encoder.
LearnedRows = dict[str, Float[np.ndarray, "n D"]]


def read_learned_embeddings(path: str | Path, widths: Sequence[int], encoder_rows: Sequence[LearnedRows]) -> None:
    """Reads learned embeddings from a file, or from a folder with `learned_embeds.safetensors`, and adds them to `encoder_rows`.

    Args:
        widths: the embedding width of each text encoder, in the order of the encoders.
        encoder_rows: the embeddings read so far, for each text encoder. Changed in place.

    Raises:
        BadInput: there is no such file, it holds something else, its embeddings fit no encoder, or the token was read before.
        Damaged: the file contradicts itself.
    """
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise BadInput(f"embeddings={path}: there is no {'file ' + FILE if path.is_dir() else 'such file'}")
    if file.suffix != ".safetensors":
        hint = "a .safetensors file: torch's own files run code when they are read"
        raise BadInput(f"embeddings={path} is no .safetensors file", hint=hint)
    tensors = SafeTensors.open(file)
    names = list(tensors.names)
    if names and set(names) <= set(OF_XL):
        token, order = tensors.metadata.get(TOKEN, file.stem), [OF_XL.index(name) for name in names]
    elif len(names) != 1:
        problem = f"embeddings={path} has {len(names)} tensors, and a file of learned embeddings has one, named by its token"
        hint = "learned_embeds.safetensors of diffusers' textual_inversion.py; clip_l and clip_g for two encoders"
        raise BadInput(problem, hint=hint)
    else:
        token, order = file.stem if names[0] == UNNAMED else names[0], [-1]
    rows = [np.asarray(tensors.read(name), np.float32) for name in names]
    add_learned_rows(encoder_rows, token, dict(zip(order, rows, strict=True)), widths, str(path))


def add_learned_rows(
    encoder_rows: Sequence[LearnedRows], token: str, rows: Mapping[int, np.ndarray], widths: Sequence[int], path: str
) -> None:
    """Adds the embeddings of one token to `encoder_rows`, which is changed in place.

    Args:
        rows: the embeddings, [D] or [n D], by the index of the text encoder. The index -1 stands for the first encoder of their width.
        path: the path of the file, for errors.

    Raises:
        BadInput: the embeddings fit no encoder, or the token was read before.
    """
    if not token.strip() or any(token.lower() in map(str.lower, tokens) for tokens in encoder_rows):
        raise BadInput(f"embeddings={path}: the token {token!r} is {'no text' if not token.strip() else 'in another file too'}")
    for number, embedding in rows.items():
        embedding = embedding[None] if embedding.ndim == 1 else embedding
        fits = embedding.ndim == 2 and len(embedding) > 0
        number = next((i for i, width in enumerate(widths) if fits and embedding.shape[1] == width), 0) if number < 0 else number
        if number >= len(widths):
            problem = f"embeddings={path} is of Stable Diffusion XL, with rows for two encoders, and this pipeline has one"
            raise BadInput(problem, hint="a folder of Stable Diffusion XL")
        if not fits or embedding.shape[1] != widths[number]:
            read = " or ".join(f"{width}" for width in widths)
            raise BadInput(f"embeddings={path} has rows of {list(embedding.shape)}, and the text encoder reads rows of {read} numbers")
        encoder_rows[number][token] = embedding


def learned_arrays(config: Any, weights: TensorReader, dtype: Any = None) -> list[Float[np.ndarray, "n D"]]:
    """Reads the embeddings of a trained token for each encoder from a model's weights. `dtype`: their new type; None keeps the stored
    type."""
    return [np.asarray(weights.read(name), weights.dtype(name) if dtype is None else dtype) for name in config.encoders]


def learned_embeddings_file(token: str, rows: Sequence[Float[np.ndarray, "n D"]], name: str = FILE) -> File:
    """Returns a token's embeddings as a file that diffusers reads. The tensor of one encoder has the token's name, the tensors of two
    encoders are `clip_l` and `clip_g`."""
    names = (token,) if len(rows) == 1 else OF_XL
    entries = [TensorEntry(key, array.shape, array.dtype, lambda array=array: array) for key, array in zip(names, rows, strict=True)]
    return tensors_file(name, entries, {"format": "pt", TOKEN: token})
