"""Z-Image: a flow model whose layers read image and text as one sequence, with the same weights for both.

    image: x += tanh(g1) norm(attention(norm(x) (1 + s1)))        x += tanh(g2) norm(GLU(norm(x) (1 + s2)))        (s, g) = M c
    text:  the same without scales and gates
    layers: z = image and text, one after the other, as `image`

c is an embedding of the time step only. Image and text first go through a few separate layers. Each is padded with a learned token to a
multiple of 32 tokens. Queries and keys are normalized and rotated by three axes of positions (RoPE). On the first axis, text tokens
have their index, and all image tokens have the number after their text. The other two axes are the row and the column of image tokens.
Z-Image Team 2025 (arXiv:2511.22699); layers with norms on both sides: NextDiT (arXiv:2406.18583).

B batch, T tokens, D width, F feed-forward, N heads, K key heads, H head size, I numbers of a patch, S width of text states, W sines and
cosines, E width of the embedder, Q width of the time step's vector, G parts of a modulation, M width of a part.
"""

from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.keymap import KeyRow, filled_tensors
from argosy.models import parts
from argosy.models.diffusion.base import PER_IMAGE, DenoiserConfig
from argosy.models.hub.z_image import ZImageHub

# Image and text are each padded to a multiple of this number of tokens.
MULTIPLE = 32


class ZImageConfig(ZImageHub, DenoiserConfig):
    """Z-Image and Z-Image-Turbo (arXiv:2511.22699)."""

    adapted: ClassVar[str | None] = r"((image|text)_)?layers\.(.*\.)?(attn|mlp)\..*"

    patch: int = Field(2, gt=0)
    """Height and width of a patch of latents."""
    width: int = Field(gt=0)
    """Width of both streams D."""
    layers: int = Field(gt=0)
    """Layers over image and text together."""
    refiner_layers: int = Field(2, gt=0)
    """Layers of the image alone, and as many of the text alone, before the others."""
    heads: int = Field(gt=0)
    """Heads N."""
    ffn: int | None = Field(None, gt=0)
    """Width of the feed-forward layer F. None: 8/3 of the width."""
    axes: tuple[int, int, int] = (32, 48, 48)
    """Features of a head that turn by each axis of positions: place in the text, row, column."""
    rope_base: float = Field(256.0, gt=0)
    """Base of the frequencies."""
    qk_norm: bool = True
    """Whether queries and keys of each head are normalized (RMSNorm)."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in norms."""
    text_width: int = Field(gt=0)
    """Width of the text encoder's states S."""
    text_tokens: int = Field(512, gt=0)
    """Tokens of a prompt that pipelines read and FLOPs count."""
    waves: int = Field(256, gt=2, multiple_of=2)
    """Cosines and sines of the time step W."""
    embedder: int = Field(1024, gt=0)
    """Width of the time step's hidden layer E."""
    time_width: int = Field(256, gt=0)
    """Width of the time step's vector Q."""
    time_scale: float = Field(1000.0, gt=0)
    """What a time of 1 is multiplied by before its sines."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "ZImageConfig":
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}")
        if sum(self.axes) != self.width // self.heads or any(n % 2 for n in self.axes):
            raise ValueError(f"axes = {self.axes} must be even and add up to the head size, {self.width // self.heads}")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"channels": 3, "width": 24, "heads": 2, "axes": (2, 4, 6), "text_width": 10, "text_tokens": 5}
        odd |= {"waves": 14, "embedder": 18, "time_width": 9}
        bare = {"qk_norm": False, "ffn": 20, "patch": 1, "time_scale": 500.0}
        return {"plain": cls(**odd, layers=3, refiner_layers=1), "bare": cls(**odd, layers=1, **bare)}

    @property
    def conditions(self) -> frozenset[str]:
        return frozenset(["text", "text_mask"])

    @property
    def size_multiple(self) -> int:
        return self.patch

    @property
    def dims(self) -> dict[str, int]:
        heads = {"N": self.heads, "K": self.heads, "H": self.width // self.heads}
        inputs = {"I": self.channels * self.patch**2, "S": self.text_width, "W": self.waves}
        times = {"E": self.embedder, "Q": self.time_width, "M": self.width}
        return {"D": self.width, "F": self.ffn or self.width * 8 // 3, **heads, **inputs, **times}

    def resolved(self) -> "ZImageConfig":
        return self.model_copy(update={"ffn": self.dims["F"]})

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module."""
        from argosy.models.blocks.z_image import ZImage

        return ZImage(self, run)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return self.tensor_rows()

    def filled_up(self, tokens: Any) -> Any:
        """Rounds a number of tokens up to a multiple of 32. Takes numbers and arrays."""
        return -(-tokens // MULTIPLE) * MULTIPLE

    def flops(self, tokens: int) -> int:
        image, text = self.filled_up(tokens), self.filled_up(self.text_tokens)
        counts = {"image_layers.": image, "text_layers.": text, "layers.": image + text, "text_embed.": self.text_tokens}
        total = 0
        for tensor in filled_tensors(*self.hub_rows()):
            if tensor.path.endswith(".w"):
                per_image = PER_IMAGE & set(tensor.axes)
                times = 1 if per_image else next((n for start, n in counts.items() if tensor.path.startswith(start)), tokens)
                total += 2 * tensor.size * tensor.layers * times
        return total + self.mixing_flops(tokens)

    def mixing_flops(self, tokens: int) -> int:
        image, text = self.filled_up(tokens), self.filled_up(self.text_tokens)
        return 4 * self.width * (self.refiner_layers * (image**2 + text**2) + self.layers * (image + text) ** 2)
