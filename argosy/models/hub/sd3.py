"""Stable Diffusion 3 and 3.5 in diffusers' format (`models.diffusion.sd3` has the equations).

The position embedding is a tensor in diffusers' files, which diffusers does not train. Here, it is a weight like any other.
"""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.hub.config import ConfigTable
from argosy.models.hub.flux import modulation_rows
from argosy.models.hub.mmdit import FINAL, embedder_rows, linear_rows, mlp_rows, mmdit_sizes, stream_rows

SD3 = "SD3Transformer2DModel"


class SD3Hub:
    """A base class of the family's config that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = (SD3,)

    def tensor_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        """Returns the rows that map tensor names to weights, and the size of each axis in the rows."""
        rows = [*sd3_token_rows(), *sd3_layer_rows(self), *FINAL, KeyRow("proj_out.weight", "final.out.w", "(p q C) D -> D (p q C)")]
        rows.append(KeyRow("proj_out.bias", "final.out.b", "(p q C) -> (p q C)"))
        names = {f"modulation{parts}": parts for parts in (2, 6, 9)}
        return [row for row in rows if row.layers is None or len(row.layers)], mmdit_sizes(self.dims, self.patch, self.channels) | names

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config)
        if config.get("out_channels", read["channels"]) not in (None, read["channels"]):
            raise BadInput(f"config.json: `out_channels` = {config['out_channels']} differs from `in_channels`, which is not built")
        width = read["heads"] * read["head_size"]
        if config.get("caption_projection_dim", width) != width:
            raise BadInput(f"config.json: `caption_projection_dim` = {config['caption_projection_dim']}, and the width is {width}")
        read["qk_norm"] = read.get("qk_norm") == "rms_norm"
        return cls(**read | {"dual_layers": tuple(config.get("dual_attention_layers") or ())})

    def to_hub(self: Any) -> dict[str, Any]:
        config = {"_class_name": SD3, "model_type": SD3, "out_channels": self.channels} | TABLE.write(self)
        more = {"qk_norm": "rms_norm" if self.qk_norm else None, "dual_attention_layers": list(self.dual_layers)}
        return self.agreed(config | more | {"caption_projection_dim": self.width})


def sd3_token_rows() -> list[KeyRow]:
    """Returns the rows of the weights that map latents to tokens."""
    return [
        KeyRow("pos_embed.proj.weight", "patch.w", "D C p q -> (p q C) D"),
        KeyRow("pos_embed.proj.bias", "patch.b", "D -> D"),
        KeyRow("pos_embed.pos_embed", "positions.w", "1 A D -> A D"),
    ]


def sd3_layer_rows(config: Any) -> list[KeyRow]:
    """Returns the rows of the layers, and of the embedders before them."""
    rows = [] if config.text_width is None else linear_rows("context_embedder", "text_embed", "D", "text")
    rows += embedder_rows("time_text_embed.timestep_embedder", "vector.time", "waves")
    rows += embedder_rows("time_text_embed.text_embedder", "vector.pooled", "pooled")
    block, norms = "transformer_blocks.{l}", config.normalizes
    plain = tuple(i for i in range(config.layers) if i not in config.second_layers)
    for layers, parts in ((plain, 6), (tuple(config.second_layers), 9)):
        rows += modulation_rows(f"{block}.norm1.linear", "layers.{l}.image.modulation", parts, layers)
    every, (inner, end) = range(config.layers), config.text_layers
    rows += stream_rows(f"{block}.attn", "layers.{l}.image.attn", every, norms=norms)
    rows += stream_rows(f"{block}.attn", "layers.{l}.text.attn", inner, added=True, norms=norms)
    rows += stream_rows(f"{block}.attn", "layers.{l}.text.attn", end, added=True, norms=norms, out=False)
    rows += mlp_rows(f"{block}.ff", "layers.{l}.image.mlp", every) + mlp_rows(f"{block}.ff_context", "layers.{l}.text.mlp", inner)
    rows += modulation_rows(f"{block}.norm1_context.linear", "layers.{l}.text.modulation", 6, inner)
    rows += modulation_rows(f"{block}.norm1_context.linear", "layers.{l}.text.modulation", 2, end)
    second = config.second_layers
    return rows + (stream_rows(f"{block}.attn2", "layers.{l}.second", second, norms=norms) if second else [])


TABLE = ConfigTable(
    [
        ("sample_size", "size"),
        ("patch_size", "patch"),
        ("in_channels", "channels"),
        ("num_layers", "layers"),
        ("attention_head_dim", "head_size"),
        ("num_attention_heads", "heads"),
        ("joint_attention_dim", "text_width"),
        ("pooled_projection_dim", "pooled_width"),
        ("pos_embed_max_size", "grid"),
        ("qk_norm", "qk_norm"),
    ],
    defaults={
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "num_layers": 18,
        "attention_head_dim": 64,
        "num_attention_heads": 18,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 96,
    },
    fixed={"qk_norm": (None, "rms_norm")},
    harmless=frozenset(["out_channels", "caption_projection_dim", "dual_attention_layers"]),
)
