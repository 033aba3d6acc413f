"""Rotations of data while a model runs, by Hadamard matrices (QuaRot, arXiv:2404.00456; R3 and R4 of SpinQuant, arXiv:2405.16406).

    ffn      y = (h H) (H' W_down)         the input of a down projection has no outliers
    heads    y = (a H) (H' W_o)            the input of attention's output projection, rotated across heads, has no outliers
    keys     (q H) . (k H) = q . k         keys have no outliers, for a KV cache in few bits; no weight changes

For `ffn` and `heads`, the weights must be rotated to match (`adapt.rotation`). Attention of other kinds (latent, gated) and recurrences
support neither `heads` nor `keys`.
"""

from collections.abc import Collection
from typing import Any

from flax import nnx

from argosy.core.errors import BadInput
from argosy.models.parts.attention.heads import Attention
from argosy.models.parts.mlp import GLU, MLP
from argosy.models.parts.moe import MoE

# For each rotation, the attribute of a module that says whether the module applies it.
ROTATES = {"ffn": "rotates", "heads": "rotates_heads", "keys": "rotates_keys"}


def with_rotations(block: Any, rotations: Collection[str]) -> Any:
    """Turns these rotations (`models.settings.Rotation`) on in the modules of a block, in place, and returns the block."""
    for _, module in list(nnx.iter_modules(block)) if rotations else ():
        if isinstance(module, GLU | MLP | MoE):
            module.rotates = "ffn" in rotations
        elif type(module) is Attention:
            module.rotates_keys, module.rotates_heads = "keys" in rotations, "heads" in rotations
    return block


def check_rotations(layers: Any, rotations: Collection[str]) -> None:
    """Checks that each rotation applies to at least one layer.

    Raises:
        BadInput: a rotation applies to no layer.
    """
    for rotation in rotations:
        if not any(getattr(module, ROTATES[rotation], False) for _, module in nnx.iter_modules(layers)):
            what = f"model.rotations has `{rotation}`, which this model has no layer for: `ffn` is of feed-forward layers and experts, "
            raise BadInput(f"{what}`heads` and `keys` of attention that is neither latent nor gated", hint=f"leave `{rotation}` out")
