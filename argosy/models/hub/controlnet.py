"""ControlNets in diffusers' format: config.json. Names of tensors are those of the layers (`models.diffusion.controlnet`)."""

from typing import Any, ClassVar

from argosy.models.hub.config import ConfigTable
from argosy.models.hub.unet import DEFAULTS, FIXED, HARMLESS, ROWS, read_levels, write_levels

CONTROLNET = "ControlNetModel"


class ControlNetHub:
    """Reads and writes folders of this family; a base class of its config."""

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
