"""Flux.1: a flow model whose first layers have separate weights for image and text, and whose last layers share weights.

    double:  x += g1 joint(modulate(x))          x += g2 MLP(modulate(x))          for image and for text, with their own weights
    single:  z += g (O joint(modulate(z)) + W2 gelu(W1 modulate(z)))               z: text and image, one after the other
    joint: attention over the tokens of text and image; queries and keys are normalized and rotated by row and column (RoPE)

shift, scale, gate = M silu(c); c = time step + pooled text (+ scale of guidance, in dev). Black Forest Labs 2024 (FLUX.1);
Esser et al. 2024 (arXiv:2403.03206); layers with parallel MLP: Dehghani et al. 2023 (arXiv:2302.05442).

B batch, T tokens, D width, F feed-forward, N heads, K key heads, H head size, I numbers of a patch, S width of text states, O pooled
width, W sines and cosines, E width of embedders, G parts of a modulation, M width of a part.
"""

from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.diffusion.mmdit import MMDiTConfig, MMDiTLayersConfig
from argosy.models.hub.flux import FluxHub


class FluxLayersConfig(MMDiTLayersConfig):
    """Settings of the layers of Flux.1, and of what comes before them."""

    joint_paths: ClassVar[tuple[str, ...]] = ("single_layers.",)

    single_layers: int = Field(ge=0)
    """Layers whose weights image and text share, after the others."""
    axes: tuple[int, int, int] = (16, 56, 56)
    """Features of a head that turn by each axis of positions: a number of the image, row, column."""
    guided: bool = False
    """Whether the scale of guidance is an input (dev); else guidance was distilled away (schnell)."""

    @model_validator(mode="after")
    def _axes_fit(self) -> "FluxLayersConfig":
        if sum(self.axes) != self.head_size or any(n % 2 for n in self.axes):
            raise ValueError(f"axes = {self.axes} must be even and add up to head_size = {self.head_size}")
        return self

    @property
    def conditions(self) -> frozenset[str]:
        return super().conditions | (frozenset(["guidance"]) if self.guided else frozenset())

    def mixing_flops(self, tokens: int) -> int:
        return 4 * (tokens + self.text_tokens) ** 2 * self.width * (self.layers + self.single_layers)


class FluxConfig(FluxHub, FluxLayersConfig, MMDiTConfig):
    """Flux.1, dev and schnell."""

    # The output projection of single layers is excluded: in files it is one matrix over two inputs, which have separate weights here.
    adapted: ClassVar[str | None] = r"layers\.(.*\.)?(image|text)\.(attn|mlp)\..*|single_layers\.(.*\.)?(attn\.[qkv]|up)"

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"channels": 3, "heads": 2, "head_size": 12, "axes": (2, 4, 6), "text_width": 10, "pooled_width": 9}
        odd |= {"text_tokens": 5, "waves": 14}
        return {"schnell": cls(**odd, layers=1, single_layers=2), "dev": cls(**odd, layers=2, single_layers=1, guided=True)}

    @property
    def distilled(self) -> bool:
        return not self.guided

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module."""
        from argosy.models.blocks.flux import Flux

        return Flux(self, run)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return self.tensor_rows()
