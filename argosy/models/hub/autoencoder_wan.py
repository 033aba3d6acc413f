"""The config.json of Wan's autoencoder in diffusers' format. Tensor names equal the paths of layers (`models.autoencoders`)."""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.models.hub.config import ConfigTable

WAN_AUTOENCODER = "AutoencoderKLWan"
# Mean and standard deviation of Wan 2.1's latents, which diffusers uses if config.json has none.
MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503,
        -0.2921)  # fmt: skip
DEVIATION = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251,
             1.9160)  # fmt: skip


class AutoencoderKLWanHub:
    """A base class of the family's config that reads and writes folders in diffusers' format."""

    hub_types: ClassVar[tuple[str, ...]] = (WAN_AUTOENCODER,)

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        settings = cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in TABLE.read(config).items()})
        if config.get("out_channels", settings.channels) != settings.channels:
            raise BadInput("config.json: `out_channels` differs from `in_channels`, which is not built")
        for key, derived in (("scale_factor_spatial", settings.factor), ("scale_factor_temporal", settings.frame_factor)):
            if config.get(key, derived) != derived:
                raise BadInput(f"config.json: `{key}` = {config[key]}, and its levels make {derived}")
        return settings

    def to_hub(self: Any) -> dict[str, Any]:
        config = {"_class_name": WAN_AUTOENCODER, "model_type": WAN_AUTOENCODER, "out_channels": self.channels} | TABLE.write(self)
        config |= {"attn_scales": [], "is_residual": False, "patch_size": None, "dropout": 0.0}
        config |= {"scale_factor_spatial": self.factor, "scale_factor_temporal": self.frame_factor}
        return self.agreed({key: list(value) if isinstance(value, tuple) else value for key, value in config.items()})


TABLE = ConfigTable(
    [
        ("in_channels", "channels"),
        ("base_dim", "width"),
        ("decoder_base_dim", "decoder_width"),
        ("z_dim", "latent_channels"),
        ("dim_mult", "multiples"),
        ("temperal_downsample", "temporal"),
        ("num_res_blocks", "layers"),
        ("latents_mean", "mean"),
        ("latents_std", "deviation"),
    ],
    defaults={"z_dim": 16, "latents_mean": MEAN, "latents_std": DEVIATION},
    # Other values are for Wan 2.2's autoencoder, which has shortcuts around levels and packs pixels.
    fixed={"is_residual": (False,), "patch_size": (None, 1), "attn_scales": ([], ())},
    harmless=frozenset(["dropout", "out_channels", "scale_factor_spatial", "scale_factor_temporal"]),
)
