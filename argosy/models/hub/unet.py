"""The config.json of Stable Diffusion's UNet in diffusers' format. Tensor names equal the paths of layers (`models.diffusion.unet`)."""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.models.hub.config import ConfigTable

UNET = "UNet2DConditionModel"
PLAIN, CROSS = ("DownBlock2D", "UpBlock2D"), ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D")


class UNetHub:
    """A base class of the family's config that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = (UNET,)

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TABLE.read(config) | read_levels(config)
        levels = len(read["widths"])
        up = config.get("up_block_types", [PLAIN[1]] + [CROSS[1]] * (levels - 1))
        _check_kinds("up_block_types", up, 1)
        if [n > 0 for n in read["transformers"]] != [kind == CROSS[1] for kind in reversed(up)]:
            raise BadInput("config.json: levels with attention differ on the way down and up, which is not built")
        if config.get("out_channels", 4) != config.get("in_channels", 4):
            raise BadInput(f"config.json: in_channels = {config.get('in_channels')}: only as many as out_channels are built")
        return cls(**read)

    def to_hub(self: Any) -> dict[str, Any]:
        config = {"_class_name": UNET, "model_type": UNET, "out_channels": self.channels} | TABLE.write(self) | write_levels(self)
        config["up_block_types"] = [CROSS[1] if n else PLAIN[1] for n in reversed(self.transformers)]
        return self.agreed(config)


def read_levels(config: dict[str, Any]) -> dict[str, Any]:
    """Reads the settings that UNets and ControlNets share: the down levels, and SDXL's additional conditions.

    Raises:
        BadInput: a kind of level is not supported.
    """
    widths = tuple(config.get("block_out_channels", (320, 640, 1280, 1280)))
    levels = len(widths)
    down = config.get("down_block_types", [CROSS[0]] * (levels - 1) + [PLAIN[0]])
    _check_kinds("down_block_types", down, 0)
    layers = _per_level(config.get("transformer_layers_per_block", 1), levels)
    read: dict[str, Any] = {"widths": widths, "middle_transformer": layers[-1]}
    read["heads"] = _per_level(config.get("num_attention_heads") or config.get("attention_head_dim", 8), levels)
    read["transformers"] = tuple(n if kind == CROSS[0] else 0 for n, kind in zip(layers, down, strict=True))
    if config.get("addition_embed_type") == "text_time":
        read["size_waves"] = config.get("addition_time_embed_dim", 256)
        read["pooled_width"] = config["projection_class_embeddings_input_dim"] - 6 * read["size_waves"]
    return read


def write_levels(settings: Any) -> dict[str, Any]:
    """The inverse of `read_levels`: returns the keys of config.json that it reads."""
    layers: Any = [n or 1 for n in settings.transformers[:-1]] + [settings.transformers[-1] or settings.middle_transformer]
    config = {
        "block_out_channels": list(settings.widths),
        "down_block_types": [CROSS[0] if n else PLAIN[0] for n in settings.transformers],
        "attention_head_dim": settings.heads[0] if len(set(settings.heads)) == 1 else list(settings.heads),
        "transformer_layers_per_block": 1 if set(layers) == {1} else layers,
    }
    if settings.pooled_width is not None:
        inputs = settings.pooled_width + 6 * settings.size_waves
        config |= {"addition_embed_type": "text_time", "addition_time_embed_dim": settings.size_waves}
        config |= {"projection_class_embeddings_input_dim": inputs}
    return config


def _check_kinds(key: str, kinds: Any, built: int) -> None:
    if other := sorted({str(kind) for kind in kinds} - {PLAIN[built], CROSS[built]}):
        raise BadInput(f"config.json: `{key}` with {', '.join(other)} is not built")


def _per_level(value: Any, levels: int) -> tuple[int, ...]:
    """Expands a value of config.json to one number for each level."""
    numbers = tuple(value) if isinstance(value, list | tuple) else (value,) * levels
    if len(numbers) != levels or not all(isinstance(number, int) for number in numbers):
        raise BadInput(f"config.json: {value!r} is no number for each of {levels} levels")
    return numbers


ROWS = [
    ("in_channels", "channels"),
    ("layers_per_block", "layers"),
    ("norm_num_groups", "groups"),
    ("norm_eps", "norm_eps"),
    ("cross_attention_dim", "text_width"),
    ("use_linear_projection", "linear"),
]
DEFAULTS = {"in_channels": 4, "layers_per_block": 2, "norm_num_groups": 32, "cross_attention_dim": 1280}
# Keys of UNets and ControlNets, with the values that are supported.
FIXED: dict[str, tuple[Any, ...]] = {
    "act_fn": ("silu",),
    "addition_embed_type": (None, "text_time"),
    "class_embed_type": (None,),
    "downsample_padding": (1,),
    "encoder_hid_dim": (None,),
    "encoder_hid_dim_type": (None,),
    "flip_sin_to_cos": (True,),
    "freq_shift": (0,),
    "mid_block_scale_factor": (1,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "num_class_embeds": (None,),
    "only_cross_attention": (False,),
    "resnet_time_scale_shift": ("default",),
}
HARMLESS = frozenset(
    """block_out_channels down_block_types attention_head_dim num_attention_heads transformer_layers_per_block
    addition_embed_type_num_heads addition_time_embed_dim projection_class_embeddings_input_dim upcast_attention""".split()  # noqa: SIM905
)
TABLE = ConfigTable(
    [("sample_size", "size"), *ROWS],
    defaults={"sample_size": 64} | DEFAULTS,
    fixed=FIXED
    | {
        "attention_type": ("default",),
        "center_input_sample": (False,),
        "conv_in_kernel": (3,),
        "conv_out_kernel": (3,),
        "cross_attention_norm": (None,),
        "dual_cross_attention": (False,),
        "mid_block_only_cross_attention": (None,),
        "resnet_out_scale_factor": (1.0,),
        "resnet_skip_time_act": (False,),
        "reverse_transformer_layers_per_block": (None,),
        "time_cond_proj_dim": (None,),
        "time_embedding_act_fn": (None,),
        "time_embedding_dim": (None,),
        "time_embedding_type": ("positional",),
        "timestep_post_act": (None,),
    },
    harmless=HARMLESS | {"out_channels", "up_block_types", "dropout", "class_embeddings_concat"},
)
