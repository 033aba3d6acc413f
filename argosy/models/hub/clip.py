"""CLIP's text encoder on the Hub: config.json and tensor names (`models.clip` has the equations).

transformers 5 writes CLIPTextModel without the prefix `text_model.`, while all published folders have it. Names are read with and
without the prefix, and written with it.
"""

from collections.abc import Collection
from typing import Any, ClassVar

from argosy.core.keymap import KeyRow
from argosy.models.hub import rows as hub
from argosy.models.hub.config import ConfigTable

PROJECTION = "text_projection.weight"
PROJECTING = "CLIPTextModelWithProjection"


class ClipTextHub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("clip_text_model",)
    hub_ignore: ClassVar[tuple[str, ...]] = ("*embeddings.position_ids",)
    hub_prefixes: ClassVar[tuple[str, ...]] = ("text_model.",)
    hub_unsaid: ClassVar[frozenset[str]] = frozenset(["projection"])

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        rows = [
            KeyRow("text_model.embeddings.token_embedding.weight", "embed.w", "V D -> V D"),
            KeyRow("text_model.embeddings.position_embedding.weight", "positions.w", "A D -> A D"),
            KeyRow("text_model.final_layer_norm.weight", "norm.scale", "D -> D"),
            KeyRow("text_model.final_layer_norm.bias", "norm.b", "D -> D"),
        ]
        rows += hub.of_layers(range(self.layers), *layer_names(), prefix="text_model.encoder.layers.{l}.")
        return rows + ([KeyRow(PROJECTION, "pooler.w", "O D -> D O")] if self.projection else []), self.dims

    def fitted(self: Any, names: Collection[str]) -> Any:
        """Returns the config without a projection if the folder has none."""
        return self if PROJECTION in names else self.model_copy(update={"projection": None})

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        # transformers 5 omits keys with default values. CLIPTextModel has the key although it has no projection.
        projects = PROJECTING in (config.get("architectures") or ())
        return cls(**read | {"projection": config.get("projection_dim", 512) if projects else None})

    def to_hub(self: Any) -> dict[str, Any]:
        kind = PROJECTING if self.projection else "CLIPTextModel"
        config = {"model_type": "clip_text_model", "architectures": [kind]} | TABLE.write(self)
        return self.agreed(config | ({"projection_dim": self.projection} if self.projection else {}))


def layer_names() -> list[tuple[str, str, str]]:
    """Returns the tensors of a layer, for both towers: (name on the Hub, our path, reading), as in `KeyRow`."""
    attention = [
        (f"self_attn.{theirs}_proj.{end}", f"attn.{ours}.{leaf}", reading)
        for theirs, ours, weight, bias in (
            ("q", "q", "(N H) D -> D N H", "(N H) -> N H"),
            ("k", "k", "(K H) D -> D K H", "(K H) -> K H"),
            ("v", "v", "(K H) D -> D K H", "(K H) -> K H"),
            ("out", "o", "D (N H) -> N H D", "D -> D"),
        )
        for end, leaf, reading in (("weight", "w", weight), ("bias", "b", bias))
    ]
    return [
        *attention,
        ("mlp.fc1.weight", "mlp.up.w", "F D -> D F"),
        ("mlp.fc1.bias", "mlp.up.b", "F -> F"),
        ("mlp.fc2.weight", "mlp.down.w", "D F -> F D"),
        ("mlp.fc2.bias", "mlp.down.b", "D -> D"),
        ("layer_norm1.weight", "attn_norm.scale", "D -> D"),
        ("layer_norm1.bias", "attn_norm.b", "D -> D"),
        ("layer_norm2.weight", "mlp_norm.scale", "D -> D"),
        ("layer_norm2.bias", "mlp_norm.b", "D -> D"),
    ]


TABLE = ConfigTable(
    [
        ("vocab_size", "vocab"),
        ("hidden_size", "width"),
        ("intermediate_size", "ffn"),
        ("num_hidden_layers", "layers"),
        ("num_attention_heads", "heads"),
        ("max_position_embeddings", "context"),
        ("layer_norm_eps", "norm_eps"),
        ("hidden_act", "activation"),
        ("eos_token_id", "eos"),
    ],
    defaults={
        "vocab_size": 49408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
        "eos_token_id": 49407,
    },
    harmless=frozenset(["projection_dim", "initializer_factor", "dropout", "tie_word_embeddings", "pruned_heads"]),
)
