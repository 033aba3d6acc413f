"""Rotations of data while a model runs, by Hadamard matrices (QuaRot, arXiv:2404.00456; R3 and R4 of SpinQuant, arXiv:2405.16406).

    ffn      y = (h H) (H' W_down)         what a down projection reads has no outliers
    heads    y = (a H) (H' W_o)            the same across heads, of what the output projection of attention reads
    keys     (q H) . (k H) = q . k         keys without outliers, for a cache in few bits; no weight changes

The first two belong to weights that are turned to match (`adapt.rotation`). Attention of other kinds (latent, gated) and recurrences
have no rotations of heads and keys.
"""

from collections.abc import Collection
from typing import Any

from flax import nnx

from argosy.core.errors import BadInput
from argosy.models.parts.attention.heads import Attention
from argosy.models.parts.mlp import GLU, MLP
from argosy.models.parts.moe import MoE

# The attribute of modules that says whether they rotate.
ROTATES = {"ffn": "rotates", "heads": "rotates_heads", "keys": "rotates_keys"}


def with_rotations(block: Any, rotations: Collection[str]) -> Any:
    """A block with these rotations of its data, of `models.settings.Rotation`."""
    for _, module in list(nnx.iter_modules(block)) if rotations else ():
        if isinstance(module, GLU | MLP | MoE):
            module.rotates = "ffn" in rotations
        elif type(module) is Attention:
            module.rotates_keys, module.rotates_heads = "keys" in rotations, "heads" in rotations
    return block


def check_rotations(layers: Any, rotations: Collection[str]) -> None:
    """Raises:
    BadInput: no layer has what a rotation is of.
    """
    for rotation in rotations:
        if not any(getattr(module, ROTATES[rotation], False) for _, module in nnx.iter_modules(layers)):
            what = f"model.rotations has `{rotation}`, which this model has no layer for: `ffn` is of feed-forward layers and experts, "
            raise BadInput(f"{what}`heads` and `keys` of attention that is neither latent nor gated", hint=f"leave `{rotation}` out")
