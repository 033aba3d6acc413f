"""The config.json of autoencoders in diffusers' format. Tensor names equal the paths of layers (`models.autoencoders`)."""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.models.hub.config import ConfigTable

# The layout of tiny autoencoders' files as their author publishes them, which diffusers does not read.
AUTHORS = "tiny_autoencoder"
# The names of attention layers in folders written before 2023, mapped to the current ones.
OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


class AutoencoderKLHub:
    """A base class of the family's config that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = ("AutoencoderKL",)
    hub_old_ends: ClassVar[dict[str, str]] = {
        f"attentions.0.{old}.{end}": f"attentions.0.{new}.{end}" for old, new in OLD_ATTENTION.items() for end in ("weight", "bias")
    }

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = KL_TABLE.read(config)
        for key, kind in (("down_block_types", "DownEncoderBlock2D"), ("up_block_types", "UpDecoderBlock2D")):
            if other := sorted({str(block) for block in config.get(key) or ()} - {kind}):
                raise BadInput(f"config.json: `{key}` with {', '.join(other)} is not built", hint=f"only {kind} is")
        if config.get("out_channels", 3) != config.get("in_channels", 3):
            raise BadInput("config.json: `out_channels` differs from `in_channels`, which is not built")
        return cls(**{"shift": 0.0} | read)

    def to_hub(self: Any) -> dict[str, Any]:
        levels = len(self.widths)
        config = {"_class_name": "AutoencoderKL", "model_type": "AutoencoderKL", "out_channels": self.channels}
        config |= {"down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels}
        config |= {"act_fn": "silu"} | KL_TABLE.write(self)
        return self.agreed(config | {"block_out_channels": list(self.widths), "shift_factor": self.shift or None})


class AutoencoderKLFlux2Hub:
    """A base class of the config of Flux.2's autoencoder that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = ("AutoencoderKLFlux2",)
    # The number of batches that batch norm's statistics were computed from.
    hub_ignore: ClassVar[tuple[str, ...]] = ("bn.num_batches_tracked",)

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        extra_keys = ("batch_norm_eps", "batch_norm_momentum", "patch_size", "decoder_block_out_channels")
        if list(config.get("patch_size", (2, 2))) != [2, 2]:
            raise BadInput(f"config.json: `patch_size` = {config['patch_size']}: only [2, 2] is built")
        if config.get("decoder_block_out_channels") not in (None, config.get("block_out_channels")):
            raise BadInput("config.json: `decoder_block_out_channels` differs from `block_out_channels`, which is not built")
        defaults = {"latent_channels": 32, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
        plain = {key: value for key, value in config.items() if key not in extra_keys}
        read: Any = AutoencoderKLHub.from_hub.__func__(cls, defaults | plain)  # type: ignore[attr-defined]
        return read.model_copy(update={"scale": 1.0, "force_upcast": False, "stats_eps": config.get("batch_norm_eps", 1e-4)})

    def to_hub(self: Any) -> dict[str, Any]:
        levels = len(self.widths)
        config = {"_class_name": "AutoencoderKLFlux2", "model_type": "AutoencoderKLFlux2", "out_channels": self.channels}
        config |= {"down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels}
        config |= {"act_fn": "silu"} | KL_TABLE.write(self)
        for key in ("scaling_factor", "shift_factor", "force_upcast"):
            del config[key]
        extra = {"block_out_channels": list(self.widths), "batch_norm_eps": self.stats_eps, "patch_size": [2, 2]}
        return self.agreed(config | extra | {"decoder_block_out_channels": None})


class AutoencoderTinyHub:
    """A base class of the family's config that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = ("AutoencoderTiny", AUTHORS)

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read = TINY_TABLE.read(config)
        widths = {int(n) for key in WIDTHS if key in config for n in _listed(config[key])} or {64}
        if len(widths) > 1:
            raise BadInput(f"config.json: {' and '.join(map(str, sorted(widths)))} channels in one tiny autoencoder are not built")
        if config["model_type"] == AUTHORS:
            blocks = tuple(config.get("num_blocks", (1, 3, 3, 3)))
            read |= {"encoder_blocks": blocks, "decoder_blocks": tuple(reversed(blocks)), "numbered": 1}
        return cls(**read | {"width": widths.pop()})

    def to_hub(self: Any) -> dict[str, Any]:
        if self.numbered or self.pools:
            config = {"model_type": AUTHORS, "architectures": [AUTHORS]} | TINY_TABLE.write(self)
            config["num_blocks"] = list(self.encoder_blocks)
            del config["num_encoder_blocks"], config["num_decoder_blocks"]
            return self.agreed(config | {"block_out_channels": self.width})
        kind = "AutoencoderTiny"
        config = {"_class_name": kind, "model_type": kind, "act_fn": "relu", "out_channels": self.channels} | TINY_TABLE.write(self)
        del config["midblock_global_pool"], config["group_norm_groups"]
        for key, blocks in (("encoder_block_out_channels", self.encoder_blocks), ("decoder_block_out_channels", self.decoder_blocks)):
            config[key] = [self.width] * len(blocks)
        lists = {key: list(config[key]) for key in ("num_encoder_blocks", "num_decoder_blocks")}
        whole = int(self.magnitude) if self.magnitude == int(self.magnitude) else self.magnitude
        return self.agreed(config | lists | {"latent_magnitude": whole})


WIDTHS = ("block_out_channels", "encoder_block_out_channels", "decoder_block_out_channels")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


KL_TABLE = ConfigTable(
    [
        ("in_channels", "channels"),
        ("latent_channels", "latent_channels"),
        ("block_out_channels", "widths"),
        ("layers_per_block", "layers"),
        ("norm_num_groups", "groups"),
        ("mid_block_add_attention", "attention"),
        ("use_quant_conv", "moments_conv"),
        ("use_post_quant_conv", "latents_conv"),
        ("scaling_factor", "scale"),
        ("shift_factor", "shift"),
        ("force_upcast", "force_upcast"),
    ],
    defaults={"latent_channels": 4, "block_out_channels": (64,), "layers_per_block": 1, "scaling_factor": 0.18215},
    fixed={"act_fn": ("silu",), "latents_mean": (None,), "latents_std": (None,)},
    harmless=frozenset(["down_block_types", "up_block_types", "out_channels", "sample_size"]),
)
TINY_TABLE = ConfigTable(
    [
        ("in_channels", "channels"),
        ("latent_channels", "latent_channels"),
        ("num_encoder_blocks", "encoder_blocks"),
        ("num_decoder_blocks", "decoder_blocks"),
        ("midblock_global_pool", "pools"),
        ("group_norm_groups", "pool_groups"),
        ("latent_magnitude", "magnitude"),
        ("scaling_factor", "scale"),
        ("shift_factor", "shift"),
    ],
    defaults={"latent_channels": 4},
    fixed={"act_fn": ("relu",), "upsample_fn": ("nearest",), "upsampling_scaling_factor": (2,)},
    # The shift and the magnitude of latents only serve to store latents as an image.
    harmless=frozenset([*WIDTHS, "out_channels", "latent_shift", "num_blocks", "force_upcast"]),
)
