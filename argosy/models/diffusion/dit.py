"""DiT and SiT: transformers over the patches of an image, whose layers are modulated by the time step and the class.

    c = W2 silu(W1 sinusoid(t)) + Y[class]                (s1, c1, g1, s2, c2, g2) = M silu(c), for each layer
    h = x + g1 Attention(modulate(x, s1, c1))             y = h + g2 MLP(modulate(h, s2, c2))
    out = P modulate(y, s, c)                             modulate(x, s, c) = LayerNorm(x) (1 + c) + s

M and P are initialized to zero, so that at first layers are the identity and the output is 0 (adaLN-Zero). The last row of Y is the
null class. DiT (Peebles and Xie 2023, arXiv:2212.09748) predicts noise. SiT (Ma et al. 2024, arXiv:2401.08740) is the same network with
`prediction: velocity`. Norms on queries and keys: Dehghani et al. 2023 (arXiv:2302.05442).

B batch, T patches, D width, F feed-forward, N heads, K key heads, H head size, I numbers of a patch, O numbers of an output patch,
W sines and cosines of the time step, E width of the time step's hidden layer, Y classes, G parts of a modulation, M width of a part.
"""

from typing import Any

from pydantic import Field, model_validator

from argosy.core.keymap import KeyRow
from argosy.models import parts
from argosy.models.diffusion.base import DenoiserConfig
from argosy.models.hub.dit import DiTHub


class DiTConfig(DiTHub, DenoiserConfig):
    """DiT (arXiv:2212.09748) and SiT (arXiv:2401.08740), class-conditional diffusion transformers."""

    size: int = Field(gt=0)
    """Height and width of the images or latents whose table of positions is the trained one; at others, positions are scaled."""
    patch: int = Field(2, gt=0)
    """Height and width of a patch."""
    width: int = Field(gt=0, multiple_of=4)
    """Width of the residual stream D."""
    layers: int = Field(gt=0)
    """Number of layers."""
    heads: int = Field(gt=0)
    """Heads N."""
    ffn: int | None = Field(None, gt=0)
    """Width of the feed-forward layer F. None: four times the width."""
    classes: int = Field(gt=0)
    """Number of classes, without the null class."""
    learned_sigma: bool = False
    """Whether the output has a variance beside the prediction, as DiT's does. It is split off, and training with `objective=diffusion`
    does not teach it."""
    qk_norm: bool = False
    """Whether queries and keys of each head are normalized (RMSNorm), which keeps training at high rates stable."""
    waves: int = Field(256, gt=2, multiple_of=2)
    """Cosines and sines of the time step W."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in the norm before the feed-forward layer."""
    intervals: bool = False
    """Whether the model reads the length of a step beside its time, for `objective=mean_flow`."""
    layer_embedders: bool = False
    """Whether each layer has its own embedding of time step and class, as diffusers' files can have; else all share one."""

    @model_validator(mode="after")
    def _divides(self) -> "DiTConfig":
        if self.width % self.heads:
            raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}")
        if self.intervals and self.layer_embedders:
            raise ValueError("intervals are read by the model's embedder: layer_embedders = false")
        if self.size % self.patch:
            raise ValueError(f"size = {self.size} is not a multiple of patch = {self.patch}")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"channels": 3, "size": 6, "patch": 2, "width": 24, "heads": 3, "classes": 5}
        diffusers = {"prediction": "epsilon", "learned_sigma": True, "layer_embedders": True}
        return {
            "intervals": cls(**odd, layers=2, waves=10, intervals=True),
            "velocity": cls(**odd, layers=3, ffn=40, waves=10, qk_norm=True),
            "diffusers": cls(**{**odd, "patch": 3, "channels": 2}, layers=3, **diffusers, norm_eps=1e-3),
        }

    @property
    def conditions(self) -> frozenset[str]:
        return frozenset(["labels", "interval"] if self.intervals else ["labels"])

    @property
    def classes_known(self) -> int:
        return self.classes

    @property
    def size_multiple(self) -> int:
        return self.patch

    @property
    def dims(self) -> dict[str, int]:
        heads = {"N": self.heads, "K": self.heads, "H": self.width // self.heads}
        patch = {"I": self.channels * self.patch**2, "O": self.channels * self.patch**2 * (2 if self.learned_sigma else 1)}
        times = {"W": self.waves, "E": self.width, "Y": self.classes + 1, "G": 6, "M": self.width}
        return {"D": self.width, "F": self.ffn or 4 * self.width, **heads, **patch, **times}

    def resolved(self) -> "DiTConfig":
        return self.model_copy(update={"ffn": self.dims["F"]})

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module."""
        from argosy.models.blocks.dit import DiT

        return DiT(self, run)

    def hub_rows(self) -> tuple[list[KeyRow], dict[str, int]]:
        return self.tensor_rows()

    def mixing_flops(self, tokens: int) -> int:
        return 4 * tokens * tokens * self.width * self.layers
