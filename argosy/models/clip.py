"""The text encoders of OpenAI's CLIP and of OpenCLIP, with which Stable Diffusion, SDXL, SD3 and Flux read prompts.

    h = x + Attention(LayerNorm(x))        y = h + MLP(LayerNorm(h))        text = P LayerNorm(y)[end]

Tokens attend to earlier tokens only, but no token is predicted. The vector at the end-of-text token stands for the text. If the model
has a projection P, that vector is projected into the space that texts and images share. Radford et al. 2021 (arXiv:2103.00020); Cherti
et al. 2022 (OpenCLIP, arXiv:2212.07143).
B batch, T time, D width, F feed-forward, N heads, H head size, V vocabulary, A positions, O projection.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.models import parts
from argosy.models.base.language import AbsoluteConfig
from argosy.models.hub.clip import ClipTextHub
from argosy.models.settings import Activation, Reach


def block(config: "ClipTextConfig", kind: str) -> "parts.Block":
    """Builds one layer. All layers are of one kind."""
    attention = parts.Attention(config.dims, config.layers, bias=True, out_bias=True)
    mlp = parts.MLP(config.dims, config.activation)
    return parts.Block(attention, mlp, pre=partial(parts.LayerNorm, config.width, config.norm_eps), cached=False)


class ClipTextConfig(ClipTextHub, AbsoluteConfig):
    """CLIP's text encoder (arXiv:2103.00020)."""

    causal: ClassVar[bool] = False
    can_score: ClassVar[bool] = False
    pooling: ClassVar[str] = "last"
    framing: ClassVar[tuple[str | None, str | None]] = ("bos_token", "eos_token")
    make: ClassVar[Any] = block

    activation: Activation = "quick_gelu"
    """Activation of the feed-forward layer: quick_gelu in OpenAI's models, gelu in OpenCLIP's."""
    projection: int | None = Field(None, gt=0)
    """Width O of the text's vector after its projection. None: there is no projection."""
    eos: int = Field(49407, ge=0)
    """Id of the end-of-text token. 2 in folders written before 2023, by a mistake of their config.json: the token is then the one with
    the largest id."""

    @model_validator(mode="after")
    def _no_head(self) -> "ClipTextConfig":
        if self.tied or self.scores:
            raise ValueError("tied and scores: this encoder has no head")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "layers": 3, "ffn": 70, "heads": 4, "context": 90, "eos": 112}
        return {"plain": cls(**odd), "projection": cls(**{**odd, "eos": 2}, activation="gelu", projection=14, norm_eps=1e-4)}

    @property
    def embedding_width(self) -> int:
        return self.projection or self.width

    @property
    def dims(self) -> dict[str, int]:
        return super().dims | ({"O": self.projection} if self.projection else {})

    def attend(self, segments: Any) -> "parts.Attend":
        return parts.Packed(segments)

    def build(self, run: "parts.Execution | None" = None) -> Any:
        """Builds the module. All layers are equal, without rotary positions."""
        from argosy.models.blocks.clip import ClipTextEncoder

        return ClipTextEncoder(self, [parts.Layer("block", Reach())] * self.layers, self.make, run)
