"""CLIP with a text tower and a vision tower, trained so that the vectors of an image and of its text have a high cosine similarity.

    image   x = LayerNorm([class, patches W] + positions), layers as in `models.clip` without causal mask        P_i LayerNorm(x)[0]
    text    as `models.clip`                                                                                     P_t LayerNorm(y)[end]
    score   exp(scale) cos(image, text)

Radford et al. 2021 (arXiv:2103.00020), as transformers' CLIPModel: OpenAI's models, and OpenCLIP's in that format.
B batch, T positions, I numbers of a patch, D width, A rows of the position embedding, O width of both vectors.
"""

from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.keymap import KeyRow
from argosy.core.settings import Settings
from argosy.models import parts
from argosy.models.base.config import InputKind, ModelConfig
from argosy.models.clip import ClipTextConfig
from argosy.models.diffusion.base import ImageSpace
from argosy.models.hub.clip_towers import ClipTowersHub
from argosy.models.settings import Activation


class ClipVision(Settings):
    """The tower of images."""

    channels: int = Field(3, gt=0)
    """Channels of an image."""
    size: int = Field(224, gt=0)
    """Height and width of an image in pixels."""
    patch: int = Field(32, gt=0)
    """Height and width of a patch."""
    width: int = Field(768, gt=0)
    """Width of the residual stream D."""
    layers: int = Field(12, gt=0)
    """Number of layers L."""
    ffn: int = Field(3072, gt=0)
    """Width of the feed-forward layer F."""
    heads: int = Field(12, gt=0)
    """Heads N, which must divide the width."""
    activation: Activation = "quick_gelu"
    """Activation of the feed-forward layer."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in LayerNorm."""

    @model_validator(mode="after")
    def _divides(self) -> "ClipVision":
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}")
        if self.size % self.patch:
            raise ValueError(f"size = {self.size} is not a multiple of patch = {self.patch}")
        return self

    @property
    def positions(self) -> int:
        """The number of positions: the patches of an image, and the class token before them."""
        return (self.size // self.patch) ** 2 + 1

    @property
    def dims(self) -> dict[str, int]:
        heads = {"N": self.heads, "K": self.heads, "H": self.width // self.heads}
        return {"D": self.width, "F": self.ffn, **heads, "A": self.positions, "I": self.channels * self.patch**2}


class ClipTowersConfig(ClipTowersHub, ModelConfig):
    """CLIP with both towers (arXiv:2103.00020)."""

    inputs: ClassVar[InputKind] = "image_texts"

    text: ClipTextConfig
    """The tower of texts, whose `projection` is the width O of the vectors."""
    vision: ClipVision
    """The tower of images."""

    @model_validator(mode="after")
    def _projects(self) -> "ClipTowersConfig":
        if self.text.projection is None:
            raise ValueError("text.projection is missing, the width of the vectors of both towers")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        text = ClipTextConfig.examples()["projection"]
        vision = ClipVision(size=15, patch=5, width=36, layers=2, ffn=50, heads=3)
        wide = vision.model_copy(update={"activation": "gelu", "norm_eps": 1e-4, "patch": 3, "channels": 1})
        return {"plain": cls(text=text, vision=vision), "wide": cls(text=text, vision=wide)}

    @property
    def vocab(self) -> int:
        """The vocabulary size of the text tower."""
        return self.text.vocab

    @property
    def context(self) -> int:
        """The longest text that the text tower reads, in tokens."""
        return self.text.context

    @property
    def embedding_width(self) -> int:
        return self.text.embedding_width

    @property
    def id_spaces(self) -> ImageSpace:
        return ImageSpace(self.vision.channels, self.vision.patch, 0)

    @property
    def dims(self) -> dict[str, int]:
        return self.hub_rows()[1]

    def flops(self, tokens: int) -> int:
        """Counts the FLOPs of one image, whose number of positions is fixed, and one text of `tokens` tokens."""
        v, n = self.vision, self.vision.positions
        layer = 4 * v.width * v.width + 2 * v.width * v.ffn
        image = 2 * (n - 1) * v.dims["I"] * v.width + v.layers * (2 * n * layer + 4 * n * n * v.width)
        return image + self.text.flops(tokens) + 2 * (v.width + self.text.width) * self.embedding_width

    def mixing_flops(self, tokens: int) -> int:
        n = self.vision.positions
        return self.text.mixing_flops(tokens) + 4 * n * n * self.vision.width * self.vision.layers

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module. All layers of a tower are equal."""
        from argosy.models.blocks.clip_towers import ClipTowers

        return ClipTowers(self, run)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return self.tower_rows()
