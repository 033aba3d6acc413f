"""Stable Diffusion 3 and 3.5: a flow model in which image and text attend to each other in every layer.

    x += g1 joint(modulate(x)) (+ g3 self(modulate(x)))          x += g2 MLP(modulate(x))          for image and for text

Image tokens have position embeddings, cut from the middle of a square grid. Text tokens have none. The last layer computes no text. 3.5
has norms on queries and keys. In 3.5 medium, the first layers have a second attention over image tokens only. Esser et al. 2024
(arXiv:2403.03206).

B batch, T tokens, D width, F feed-forward, N heads, K key heads, H head size, I numbers of a patch, S width of text states, O pooled
width, W sines and cosines, E width of embedders, G parts of a modulation, M width of a part, A rows of the table of positions.
"""

from typing import Any

from pydantic import Field, model_validator

from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.diffusion.mmdit import MMDiTConfig, MMDiTLayersConfig
from argosy.models.hub.sd3 import SD3Hub


class SD3LayersConfig(MMDiTLayersConfig):
    """Settings of the layers of Stable Diffusion 3 and 3.5, and of what comes before them."""

    size: int = Field(128, gt=0)
    """Height and width of the latents that the model was made for: the default size of images."""
    grid: int = Field(gt=0)
    """Height and width of the table of positions, in patches."""
    qk_norm: bool = False
    """Whether queries and keys are normalized (3.5)."""
    dual_layers: tuple[int, ...] = ()
    """Layers with a second attention, of image tokens alone (3.5 medium)."""
    text_tokens: int = Field(333, gt=0)
    """Tokens of a prompt that pipelines read and FLOPs count: 77 of CLIP and 256 of T5."""

    @property
    def dims(self) -> dict[str, int]:
        return super().dims | {"A": self.grid**2}

    @property
    def normalizes(self) -> bool:
        """Whether queries and keys of the layers are normalized."""
        return self.qk_norm

    @property
    def second_layers(self) -> tuple[int, ...]:
        """The layers with a second attention."""
        return self.dual_layers

    @property
    def text_layers(self) -> tuple[range, range]:
        """The layers that compute a text stream, and the layers that only read one."""
        return range(self.layers - 1), range(self.layers - 1, self.layers)

    def mixing_flops(self, tokens: int) -> int:
        joint = self.layers * (tokens + self.text_tokens) ** 2
        return 4 * self.width * (joint + len(self.second_layers) * tokens**2)


class SD3Config(SD3Hub, SD3LayersConfig, MMDiTConfig):
    """Stable Diffusion 3 and 3.5 (arXiv:2403.03206)."""

    @model_validator(mode="after")
    def _layers_exist(self) -> "SD3Config":
        if wrong := [i for i in self.dual_layers if not 0 <= i < self.layers]:
            raise ValueError(f"dual_layers names {wrong[0]}, and there are {self.layers} layers")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"channels": 3, "heads": 2, "head_size": 10, "text_width": 10, "pooled_width": 9, "grid": 5}
        odd |= {"text_tokens": 5, "waves": 14, "size": 8}
        return {"sd3": cls(**odd, layers=3), "sd3.5": cls(**odd, layers=4, qk_norm=True, dual_layers=(0, 1))}

    @property
    def kinds(self) -> list[str]:
        """The kind of each layer: the structure of its weights."""
        kinds = ["dual" if i in self.dual_layers else "block" for i in range(self.layers)]
        return [*kinds[:-1], "dual_last" if kinds[-1] == "dual" else "last"]

    @property
    def idle_weights(self) -> tuple[str, ...]:
        # The last layer computes no text stream, so the text's queries are not read.
        return (f"layers.{self.layers - 1}.text.attn.q*",)

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module."""
        from argosy.models.blocks.sd3 import SD3

        return SD3(self, run)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return self.tensor_rows()
