"""GPT-2: learned positions, LayerNorm, biases everywhere.

    h = x + Attention(LayerNorm(x))        y = h + MLP(LayerNorm(h))

Radford et al. 2019 (Language models are unsupervised multitask learners). On the Hub, GPT-2's matrices are [in, out], queries, keys and
values are fused, and names may begin with `transformer.`.
B batch, T time, D width, F feed-forward, N heads, H head size, V vocabulary, A positions.
"""

from functools import partial
from typing import Any, ClassVar

from argosy.models import parts
from argosy.models.base.language import AbsoluteConfig
from argosy.models.hub.gpt2 import GPT2Hub
from argosy.models.settings import Activation, Reach


def block(config: "GPT2Config", kind: str) -> "parts.Block":
    """Builds one layer. All layers are of one kind."""
    attention = parts.Attention(config.dims, config.layers, bias=True, out_bias=True)
    mlp = parts.MLP(config.dims, config.activation)
    return parts.Block(attention, mlp, pre=partial(parts.LayerNorm, config.width, config.norm_eps))


class GPT2Config(GPT2Hub, AbsoluteConfig):
    """GPT-2 (Radford et al. 2019)."""

    make: ClassVar[Any] = block

    tied: bool = True
    """Uses the embedding as the output head (tied embeddings)."""
    activation: Activation = "gelu_tanh"
    """Activation of the feed-forward layer."""

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "layers": 3, "ffn": 70, "heads": 4, "context": 90}
        return {"tied": cls(**odd), "untied": cls(**{**odd, "width": 42, "heads": 3}, tied=False, activation="relu")}

    def build(self, run: "parts.Execution | None" = None) -> "parts.Decoder":
        """Builds the module. All layers are equal, without rotary positions."""
        plan = [parts.Layer("block", Reach())] * self.layers
        norm = parts.LayerNorm(self.width, self.norm_eps)
        return parts.Decoder(self, plan, self.make, norm, run, positions=True)
