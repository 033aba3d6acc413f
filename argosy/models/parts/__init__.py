"""The parts that models are made of. A part is here if at least two families use it.

`parts.Attention` imports the module of `Attention` on first use. A family's file only describes its parts until `build` is called, so
importing that file imports neither jax nor flax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.models.parts.attention.attend import Attend as Attend
    from argosy.models.parts.attention.attend import Bidirectional as Bidirectional
    from argosy.models.parts.attention.attend import Packed as Packed
    from argosy.models.parts.attention.heads import Attention as Attention
    from argosy.models.parts.attention.latent import LatentAttention as LatentAttention
    from argosy.models.parts.block import Block as Block
    from argosy.models.parts.decoder import Decoder as Decoder
    from argosy.models.parts.encoder import TextEncoder as TextEncoder
    from argosy.models.parts.mlp import GLU as GLU
    from argosy.models.parts.mlp import MLP as MLP
    from argosy.models.parts.moe import MoE as MoE
    from argosy.models.parts.norm import LayerNorm as LayerNorm
    from argosy.models.parts.norm import RMSNorm as RMSNorm
    from argosy.models.parts.stack import Execution as Execution
    from argosy.models.parts.stack import Layer as Layer

_FROM = {
    "Attend": "argosy.models.parts.attention.attend",
    "Attention": "argosy.models.parts.attention.heads",
    "Bidirectional": "argosy.models.parts.attention.attend",
    "Block": "argosy.models.parts.block",
    "Decoder": "argosy.models.parts.decoder",
    "TextEncoder": "argosy.models.parts.encoder",
    "Execution": "argosy.models.parts.stack",
    "GLU": "argosy.models.parts.mlp",
    "LatentAttention": "argosy.models.parts.attention.latent",
    "Layer": "argosy.models.parts.stack",
    "LayerNorm": "argosy.models.parts.norm",
    "MLP": "argosy.models.parts.mlp",
    "MoE": "argosy.models.parts.moe",
    "Packed": "argosy.models.parts.attention.attend",
    "RMSNorm": "argosy.models.parts.norm",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FROM[name]), name)
