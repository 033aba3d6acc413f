"""Learned embeddings of new tokens (textual inversion): rows that text encoders read in place of those of their vocabularies.

    {"<cat-toy>": [D] or [n D]}              diffusers' learned_embeds.safetensors: rows of the first text encoder
    {"emb_params": [n D]}                    AUTOMATIC1111's; the token is the name of the file
    {"clip_l": [n D], "clip_g": [n E]}       of Stable Diffusion XL: rows of both; the token is in the metadata, or the file's name

Gal et al. 2022 (arXiv:2208.01618). In a prompt a token stands for its n rows. Rows of the second encoder of XL alone are read too, by
their width. An encoder without rows of a token reads its name as text, as in diffusers.
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
# The key of a file's metadata with the token, where tensors are named by encoder.
TOKEN = "token"
# The rows of each token, for one encoder.
LearnedRows = dict[str, Float[np.ndarray, "n D"]]


def read_learned_embeddings(path: str | Path, widths: Sequence[int], encoder_rows: Sequence[LearnedRows]) -> None:
    """Adds the rows of a file, or of a folder with `learned_embeds.safetensors`, to those that are read already.

    Args:
        widths: of the text encoders' embeddings, in their order.
        encoder_rows: the rows of each encoder.

    Raises:
        BadInput: there is no such file, it holds something else, rows are of another model, or the token is there already.
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
    """Adds the rows of one token to those that are read already.

    Args:
        rows: by the number of their encoder; -1: of the first encoder whose rows are as wide.
        path: where they are, for errors.

    Raises:
        BadInput: rows are of another model, or the token is there already.
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
    """The rows of a token for each encoder, from its stored weights. dtype: to write them in; None: as they are stored."""
    return [np.asarray(weights.read(name), weights.dtype(name) if dtype is None else dtype) for name in config.encoders]


def learned_embeddings_file(token: str, rows: Sequence[Float[np.ndarray, "n D"]], name: str = FILE) -> File:
    """The file of a token's rows, as diffusers reads it: of one encoder under the token's name, of both as `clip_l` and `clip_g`."""
    names = (token,) if len(rows) == 1 else OF_XL
    entries = [TensorEntry(key, array.shape, array.dtype, lambda array=array: array) for key, array in zip(names, rows, strict=True)]
    return tensors_file(name, entries, {"format": "pt", TOKEN: token})
