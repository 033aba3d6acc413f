"""Learned embeddings of new tokens (textual inversion): rows that a text encoder reads in place of those of its vocabulary.

    {"<cat-toy>": [D] or [n D]}     diffusers' learned_embeds.safetensors
    {"emb_params": [n D]}           AUTOMATIC1111's; the token is the name of the file

Gal et al. 2022 (arXiv:2208.01618). In a prompt a token stands for its n rows. Files of Stable Diffusion XL, with rows for two encoders
(`clip_l`, `clip_g`), are refused.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from argosy.core.errors import BadInput
from argosy.core.formats.safetensors import SafeTensors

FILE = "learned_embeds.safetensors"
UNNAMED = "emb_params"
OF_XL = ("clip_l", "clip_g")


def read_learned_embeddings(paths: Sequence[str | Path], width: int) -> dict[str, Float[np.ndarray, "n D"]]:
    """The rows of each token, from files or folders with `learned_embeds.safetensors`.

    Args:
        width: of the encoder's embedding.

    Raises:
        BadInput: there is no such file, it holds something else, rows are of another model, or two files have the same token.
        Damaged: the file contradicts itself.
    """
    found: dict[str, np.ndarray] = {}
    for path in map(Path, paths):
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise BadInput(f"embeddings={path}: there is no {'file ' + FILE if path.is_dir() else 'such file'}")
        if file.suffix != ".safetensors":
            hint = "a .safetensors file: torch's own files run code when they are read"
            raise BadInput(f"embeddings={path} is no .safetensors file", hint=hint)
        tensors = SafeTensors.open(file)
        names = list(tensors.names)
        if set(names) == set(OF_XL):
            raise BadInput(f"embeddings={path} is of Stable Diffusion XL, with rows for two encoders, which is not built")
        if len(names) != 1:
            what = f"embeddings={path} has {len(names)} tensors, and a file of learned embeddings has one, named by its token"
            raise BadInput(what, hint="learned_embeds.safetensors of diffusers' textual_inversion.py")
        token = file.stem if names[0] == UNNAMED else names[0]
        rows = np.asarray(tensors.read(names[0]), np.float32)
        rows = rows[None] if rows.ndim == 1 else rows
        if rows.ndim != 2 or not len(rows) or rows.shape[1] != width:
            raise BadInput(f"embeddings={path} has rows of {list(rows.shape)}, and the text encoder reads rows of {width} numbers")
        if not token.strip() or token.lower() in map(str.lower, found):
            raise BadInput(f"embeddings={path}: the token {token!r} is {'no text' if not token.strip() else 'in another file too'}")
        found[token] = rows
    return found
