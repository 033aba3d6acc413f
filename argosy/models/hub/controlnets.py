"""ControlNets in diffusers' format (`models.diffusion.controlnets` has the equations). For ControlNets of UNets, tensor names equal the
paths of layers."""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.hub.config import ConfigTable
from argosy.models.hub.flux import TABLE as FLUX_TABLE
from argosy.models.hub.flux import flux_layer_rows, read_flux, write_flux
from argosy.models.hub.mmdit import linear_rows, mmdit_sizes
from argosy.models.hub.sd3 import TABLE as SD3_TABLE
from argosy.models.hub.sd3 import sd3_layer_rows, sd3_token_rows
from argosy.models.hub.unet import DEFAULTS, FIXED, HARMLESS, ROWS, read_levels, write_levels

CONTROLNET, FLUX_CONTROLNET, SD3_CONTROLNET = "ControlNetModel", "FluxControlNetModel", "SD3ControlNetModel"


class ControlNetHub:
    """A base class of the family's config that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = (CONTROLNET,)

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config) | read_levels(config)
        return cls(**read | {"embedding": tuple(read["embedding"])})

    def to_hub(self: Any) -> dict[str, Any]:
        config = {"_class_name": CONTROLNET, "model_type": CONTROLNET} | TABLE.write(self) | write_levels(self)
        return self.agreed(config | {"conditioning_embedding_out_channels": list(self.embedding)})


TABLE = ConfigTable(
    [
        *ROWS,
        ("conditioning_channels", "control_channels"),
        ("conditioning_embedding_out_channels", "embedding"),
        ("controlnet_conditioning_channel_order", "channel_order"),
    ],
    defaults=DEFAULTS | {"conditioning_embedding_out_channels": [16, 32, 96, 256]},
    fixed=FIXED | {"global_pool_conditions": (False,)},
    harmless=HARMLESS,
)


class FluxControlNetHub:
    """A base class of the config of Flux.1's ControlNets that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = (FLUX_CONTROLNET,)

    def tensor_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        """Returns the rows that map tensor names to weights, and the size of each axis in the rows."""
        rows = flux_layer_rows(self)
        rows += linear_rows("controlnet_x_embedder", "control_patch", "D", "I")
        rows[-2] = KeyRow("controlnet_x_embedder.weight", "control_patch.w", "D (C p q) -> (p q C) D")
        rows += linear_rows("controlnet_blocks.{l}", "layers.{l}.control", "residual", "D", range(self.layers))
        rows += linear_rows("controlnet_single_blocks.{l}", "single_layers.{l}.control", "residual", "D", range(self.single_layers))
        if self.modes is not None:
            rows.append(KeyRow("controlnet_mode_embedder.weight", "modes_embed.w", "classes D -> classes D"))
        sizes = mmdit_sizes(self.dims, self.patch, self.channels) | {"modulation3": 3, "modulation6": 6, "residual": self.width}
        return [row for row in rows if row.layers is None or len(row.layers)], sizes | {"classes": self.modes or 0}

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        if config.get("conditioning_embedding_channels") is not None:
            problem = "config.json: `conditioning_embedding_channels`: ControlNets that read pixels (XLabs) are not built"
            raise BadInput(problem, hint="those of InstantX and Shakker Labs read latents")
        return cls(**read_flux(FLUX_CONTROLNET_TABLE, config))

    def to_hub(self: Any) -> dict[str, Any]:
        head = {"_class_name": FLUX_CONTROLNET, "model_type": FLUX_CONTROLNET, "conditioning_embedding_channels": None}
        return self.agreed(head | write_flux(self, FLUX_CONTROLNET_TABLE))


FLUX_CONTROLNET_TABLE = ConfigTable(
    [*FLUX_TABLE.rows, ("num_mode", "modes")],
    defaults=FLUX_TABLE.defaults,
    fixed=FLUX_TABLE.fixed,
    harmless=FLUX_TABLE.harmless | {"conditioning_embedding_channels"},
)


class SD3ControlNetHub:
    """A base class of the config of Stable Diffusion 3's ControlNets that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = (SD3_CONTROLNET,)

    def tensor_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        """Returns the rows that map tensor names to weights, and the size of each axis in the rows."""
        rows = [
            KeyRow("pos_embed_input.proj.weight", "control_patch.w", "D C p q -> (p q C) D"),
            KeyRow("pos_embed_input.proj.bias", "control_patch.b", "D -> D"),
        ]
        rows += sd3_token_rows() if self.positions else []
        rows += sd3_layer_rows(self)
        rows += linear_rows("controlnet_blocks.{l}", "layers.{l}.control", "residual", "D", range(self.layers))
        sizes = mmdit_sizes(self.dims, self.patch, self.channels) | {f"modulation{parts}": parts for parts in (2, 6, 9)}
        return [row for row in rows if row.layers is None or len(row.layers)], sizes | {"residual": self.width}

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        if config.get("extra_conditioning_channels", 0) != 0:
            more = config["extra_conditioning_channels"]
            problem = f"config.json: `extra_conditioning_channels` = {more}: ControlNets of inpainting are not built"
            raise BadInput(problem, hint="one that reads a control image alone")
        read = SD3_CONTROLNET_TABLE.read(config)
        if read["positions"] and config.get("pos_embed_type", "sincos") != "sincos":
            raise BadInput(f"config.json: `pos_embed_type` = {config['pos_embed_type']!r} with `use_pos_embed` is not built")
        width = read["heads"] * read["head_size"]
        if "text_width" in read and config.get("caption_projection_dim", width) != width:
            raise BadInput(f"config.json: `caption_projection_dim` = {config['caption_projection_dim']}, and the width is {width}")
        read["qk_norm"] = read.get("qk_norm") == "rms_norm"
        return cls(**read | {"dual_layers": tuple(config.get("dual_attention_layers") or ())})

    def to_hub(self: Any) -> dict[str, Any]:
        written = {"_class_name": SD3_CONTROLNET, "model_type": SD3_CONTROLNET, "out_channels": self.channels}
        written |= SD3_CONTROLNET_TABLE.write(self) | {"qk_norm": "rms_norm" if self.qk_norm else None}
        more = {"dual_attention_layers": list(self.dual_layers), "caption_projection_dim": self.width, "extra_conditioning_channels": 0}
        return self.agreed(written | more | {"pos_embed_type": "sincos" if self.positions else None})


SD3_CONTROLNET_TABLE = ConfigTable(
    [*SD3_TABLE.rows, ("use_pos_embed", "positions"), ("force_zeros_for_pooled_projection", "zero_pooled")],
    defaults={**SD3_TABLE.defaults, "use_pos_embed": True, "force_zeros_for_pooled_projection": True},
    fixed=SD3_TABLE.fixed,
    harmless=SD3_TABLE.harmless | {"pos_embed_type", "extra_conditioning_channels"},
)
