"""Flux.1 in diffusers' format (`models.diffusion.flux` has the equations). `single_file` has the names of Black Forest Labs."""

from collections.abc import Sequence
from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.hub.config import ConfigTable
from argosy.models.hub.mmdit import FINAL, embedder_rows, linear_rows, mlp_rows, mmdit_sizes, stream_rows

FLUX = "FluxTransformer2DModel"


class FluxHub:
    """A base class of the family's config that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = (FLUX,)

    def tensor_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        """Returns the rows that map tensor names to weights, and the size of each axis in the rows."""
        rows = [*flux_layer_rows(self), *FINAL, KeyRow("proj_out.weight", "final.out.w", "(C p q) D -> D (p q C)")]
        rows.append(KeyRow("proj_out.bias", "final.out.b", "(C p q) -> (p q C)"))
        return rows, mmdit_sizes(self.dims, self.patch, self.channels) | {"modulation3": 3, "modulation6": 6}

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        if config.get("out_channels") not in (None, config.get("in_channels", TABLE.defaults["in_channels"])):
            raise BadInput(f"config.json: `out_channels` = {config['out_channels']} differs from `in_channels`, which is not built")
        return cls(**read_flux(TABLE, config))

    def to_hub(self: Any) -> dict[str, Any]:
        return self.agreed({"_class_name": FLUX, "model_type": FLUX, "out_channels": None} | write_flux(self, TABLE))


def read_flux(table: ConfigTable, config: dict[str, Any]) -> dict[str, Any]:
    """Reads the settings of Flux's layers from a config.json.

    Raises:
        BadInput: latents cannot be packed two by two, or one of the reasons of `ConfigTable.read`.
    """
    read = table.read(config)
    if read["channels"] % 4:
        raise BadInput(f"config.json: `in_channels` = {read['channels']} is no multiple of 4: latents are packed two by two")
    return read | {"channels": read["channels"] // 4, "axes": tuple(read["axes"])}


def write_flux(config: Any, table: ConfigTable) -> dict[str, Any]:
    """Returns the keys of config.json that describe Flux's layers."""
    fixed = {"patch_size": 1, "in_channels": config.channels * config.patch**2, "axes_dims_rope": list(config.axes)}
    return table.write(config) | fixed


def flux_layer_rows(config: Any) -> list[KeyRow]:
    """Returns the rows of Flux's layers, and of the embedders before them."""
    double, single = range(config.layers), range(config.single_layers)
    rows = linear_rows("x_embedder", "patch", "D", "I")
    # diffusers has the channels of a patch before the pixels.
    rows[0] = KeyRow("x_embedder.weight", "patch.w", "D (C p q) -> (p q C) D")
    rows += linear_rows("context_embedder", "text_embed", "D", "text")
    rows += embedder_rows("time_text_embed.timestep_embedder", "vector.time", "waves")
    rows += embedder_rows("time_text_embed.text_embedder", "vector.pooled", "pooled")
    rows += embedder_rows("time_text_embed.guidance_embedder", "vector.guidance", "waves") if config.guided else []
    block = "transformer_blocks.{l}"
    for ours, end in (("image", ""), ("text", "_context")):
        at = f"layers.{{l}}.{ours}"
        rows += modulation_rows(f"{block}.norm1{end}.linear", f"{at}.modulation", 6, double)
        rows += stream_rows(f"{block}.attn", f"{at}.attn", double, added=ours == "text")
        rows += mlp_rows(f"{block}.ff{end}", f"{at}.mlp", double)
    block, at = "single_transformer_blocks.{l}", "single_layers.{l}"
    rows += modulation_rows(f"{block}.norm.linear", f"{at}.modulation", 3, single)
    rows += stream_rows(f"{block}.attn", f"{at}.attn", single, out=False)
    rows += linear_rows(f"{block}.proj_mlp", f"{at}.up", "F", "D", single)
    both = (f"{at}.attn.o.w", f"{at}.down.w")
    rows.append(KeyRow(f"{block}.proj_out.weight", both, "D (N H|F) -> N H D, F D", single))
    rows.append(KeyRow(f"{block}.proj_out.bias", f"{at}.attn.o.b", "D -> D", single))
    return rows


def modulation_rows(theirs: str, ours: str, parts: int, layers: Sequence[int]) -> list[KeyRow]:
    """Returns the key-table rows for the linear layer of a modulation that yields `parts` vectors. The name of the axis of these
    vectors includes `parts`, because a model has modulations with different numbers of vectors."""
    name = f"modulation{parts}"
    return linear_rows(theirs, ours, f"{name} modulated", "D", layers)


TABLE = ConfigTable(
    [
        ("in_channels", "channels"),
        ("num_layers", "layers"),
        ("num_single_layers", "single_layers"),
        ("attention_head_dim", "head_size"),
        ("num_attention_heads", "heads"),
        ("joint_attention_dim", "text_width"),
        ("pooled_projection_dim", "pooled_width"),
        ("guidance_embeds", "guided"),
        ("axes_dims_rope", "axes"),
    ],
    defaults={
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "axes_dims_rope": (16, 56, 56),
    },
    fixed={"patch_size": (1,)},
    harmless=frozenset(["out_channels"]),
)
