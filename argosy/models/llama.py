"""Llama, and models that differ only in sizes: Llama 1 to 3.3, SmolLM2, TinyLlama, Mistral 7B and Nemo, Ministral.

    h = x + Attention(RMSNorm(x))        y = h + SwiGLU(RMSNorm(h))

Touvron et al. 2023 (arXiv:2302.13971, 2307.09288), the Llama team 2024 (arXiv:2407.21783); grouped queries from Ainslie et al.
2023 (arXiv:2305.13245), sliding windows from Jiang et al. 2023 (arXiv:2310.06825).
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from argosy.core.keymap import Row
from argosy.models import hub_rows as hub
from argosy.models import parts
from argosy.models.family import DecoderConfig
from argosy.models.hub_config import SIZES, ConfigTable, read_pattern, read_rope, write_pattern, write_rope
from argosy.models.settings import Linear, Llama3, Rope, Yarn


def block(config: "LlamaConfig", kind: str) -> "parts.Block":
    """One layer. All layers are of one kind."""
    bias = config.attention_bias
    attention = parts.Attention(config.dims, config.layers, bias=bias, out_bias=bias)
    mlp = parts.GLU(config.dims, config.activation, bias=config.mlp_bias)
    return parts.Block(attention, mlp, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class LlamaConfig(DecoderConfig):
    """Llama (arXiv:2302.13971, 2307.09288, 2407.21783), Mistral 7B (arXiv:2310.06825) and relatives."""

    hub_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "ministral")
    make: ClassVar[Any] = block

    attention_bias: bool = False
    """Adds biases to the four projections of attention."""
    mlp_bias: bool = False
    """Adds biases to the three projections of the feed-forward layer."""

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "layers": 3, "ffn": 70, "heads": 4, "context": 200}
        scaled = Rope(scaling=Llama3(original=16))
        return {
            "plain": cls(**odd, kv_heads=2, head_size=14, rope=Rope(scaling=Linear(factor=3))),
            "tied-biased": cls(
                **odd, kv_heads=1, head_size=10, tied=True, attention_bias=True, mlp_bias=True, rope=scaled
            ),
            "window": cls(
                **odd, head_size=12, window=7, activation="gelu_tanh", rope=Rope(scaling=Yarn(factor=4, original=16))
            ),
            "pattern": cls(**{**odd, "layers": 5}, kv_heads=2, head_size=12, window=6, pattern="LLG"),
        }

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        over = range(self.layers)
        rows = hub.attention(over, bias=self.attention_bias, out_bias=self.attention_bias)
        rows += hub.glu(over, bias=self.mlp_bias) + hub.norms(over, hub.PRE_NORMS) + hub.ends(self.tied, scores=self.scores)
        return rows, self.dims

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "LlamaConfig":
        table = TABLES[config["model_type"]]
        read = table.read(config)
        return cls(**read, **read_pattern(config, read), rope=Rope(**read_rope(config)))

    def to_hub(self) -> dict[str, Any]:
        """Mistral with a window, Ministral with a window in some layers, otherwise Llama."""
        mixed = len(set(self.spans)) > 1
        kind = ("ministral", "MinistralForCausalLM") if mixed else ("mistral", "MistralForCausalLM")
        kind = kind if self.window else ("llama", "LlamaForCausalLM")
        written = {"model_type": kind[0], "architectures": [kind[1]]} | TABLES[kind[0]].write(self)
        written |= {"head_dim": self.H, "num_key_value_heads": self.K} | write_rope(self.rope)
        return self.agreed(written | (write_pattern(self.spans) if mixed else {}))


# By `model_type`: keys, the defaults of transformers, and keys that it never reads.
TABLES = {
    "llama": ConfigTable(
        [*SIZES, ("attention_bias", "attention_bias"), ("mlp_bias", "mlp_bias")],
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
        fixed={"rope_interleaved": (False, None)},
        harmless=frozenset(["sliding_window"]),
    ),
    "mistral": ConfigTable(
        [*SIZES, ("sliding_window", "window")],
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        harmless=frozenset(["attention_bias", "mlp_bias"]),
    ),
}
TABLES["ministral"] = replace(TABLES["mistral"], harmless=TABLES["mistral"].harmless | {"layer_types"})
