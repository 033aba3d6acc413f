"""Llama, and what differs from it only in numbers: Llama 1 to 3.3, SmolLM2, TinyLlama, Mistral 7B.

    h = x + Attention(RMSNorm(x))        y = h + SwiGLU(RMSNorm(h))

Touvron et al. 2023 (arXiv:2302.13971, 2307.09288), the Llama team 2024 (arXiv:2407.21783); grouped queries from Ainslie et al.
2023 (arXiv:2305.13245), sliding windows from Jiang et al. 2023 (arXiv:2310.06825).
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from pydantic import Field, model_validator

from argosy.core.errors import Unsupported
from argosy.core.keymap import Row
from argosy.models.family import UNROLL, FamilyConfig
from argosy.models.hub_config import ConfigTable, read_rope, write_rope
from argosy.models.parts.attend import HEADS, Attend, Cache, Spec
from argosy.models.parts.einsum import Einsum
from argosy.models.parts.mlp import GLU, Activation
from argosy.models.parts.norm import RMSNorm
from argosy.models.parts.rope import Linear, Llama3, Rope, Yarn, rotate
from argosy.models.parts.stack import Layer, Run, Stack, Told, on_rows
from argosy.ops.attention import Score


class LlamaConfig(FamilyConfig):
    """Llama (arXiv:2302.13971, 2307.09288, 2407.21783), Mistral 7B (arXiv:2310.06825) and relatives."""

    hub_types: ClassVar[tuple[str, ...]] = ("llama", "mistral")

    ffn: int = Field(gt=0)
    """Width of the feed-forward layer F."""
    heads: int = Field(gt=0)
    """Query heads N."""
    kv_heads: int | None = Field(None, gt=0)
    """Key and value heads K, which must divide `heads`; as many as `heads` unless told."""
    head_size: int | None = Field(None, gt=0)
    """Head size H, even; width / heads unless told."""
    rope: Rope = Rope()
    """Rotary positions."""
    window: int | None = Field(None, gt=0)
    """A token sees itself and the window-1 before it; everything before it unless told."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    activation: Activation = "silu"
    """Of the feed-forward gate."""
    attention_bias: bool = False
    """Biases on the four projections of attention."""
    mlp_bias: bool = False
    """Biases on the three projections of the feed-forward layer."""

    @model_validator(mode="after")
    def _consistent(self) -> "LlamaConfig":
        if self.heads % self.K:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.K}")
        if self.head_size is None and self.width % self.heads:
            raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}: set head_size")
        if self.H % 2:
            raise ValueError(f"head size {self.H} is odd: rotary positions turn pairs")
        return self

    @property
    def K(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def H(self) -> int:
        return self.width // self.heads if self.head_size is None else self.head_size

    @property
    def dims(self) -> dict[str, int]:
        return {"D": self.width, "F": self.ffn, "N": self.heads, "K": self.K, "H": self.H, "V": self.vocab}

    def resolved(self) -> "LlamaConfig":
        return self.model_copy(update={"kv_heads": self.K, "head_size": self.H})

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
        }

    def build(self, run: Run = UNROLL) -> "Llama":
        return Llama(self, run)

    def parameters(self) -> int:
        D, F, N, K, H, V = self.dims.values()
        attention = 2 * D * N * H + 2 * D * K * H + self.attention_bias * (N * H + 2 * K * H + D)
        ffn = 3 * D * F + self.mlp_bias * (2 * F + D)
        return self.layers * (attention + ffn + 2 * D) + D + V * D * (1 if self.tied else 2)

    def flops(self, tokens: int) -> int:
        D, F, N, K, H, V = self.dims.values()
        projections = 2 * D * N * H + 2 * D * K * H + 3 * D * F
        return 2 * tokens * (self.layers * (projections + 2 * tokens * N * H) + D * V)

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        over = tuple(range(self.layers))

        def layer(theirs: str, ours: str, how: str) -> Row:
            return Row(f"model.layers.{{l}}.{theirs}", f"layers.{{l}}.{ours}", how, over)

        rows = [
            Row("model.embed_tokens.weight", "embed.w", "V D -> V D", tied_to="lm_head.weight" if self.tied else None),
            layer("input_layernorm.weight", "attn_norm.scale", "D -> D"),
            layer("self_attn.q_proj.weight", "attn.q.w", "(N H) D -> D N H"),
            layer("self_attn.k_proj.weight", "attn.k.w", "(K H) D -> D K H"),
            layer("self_attn.v_proj.weight", "attn.v.w", "(K H) D -> D K H"),
            layer("self_attn.o_proj.weight", "attn.o.w", "D (N H) -> N H D"),
            layer("post_attention_layernorm.weight", "mlp_norm.scale", "D -> D"),
            layer("mlp.gate_proj.weight", "mlp.gate.w", "F D -> D F"),
            layer("mlp.up_proj.weight", "mlp.up.w", "F D -> D F"),
            layer("mlp.down_proj.weight", "mlp.down.w", "D F -> F D"),
            Row("model.norm.weight", "norm.scale", "D -> D"),
        ]
        if self.attention_bias:
            rows += [
                layer("self_attn.q_proj.bias", "attn.q.b", "(N H) -> N H"),
                layer("self_attn.k_proj.bias", "attn.k.b", "(K H) -> K H"),
                layer("self_attn.v_proj.bias", "attn.v.b", "(K H) -> K H"),
                layer("self_attn.o_proj.bias", "attn.o.b", "D -> D"),
            ]
        if self.mlp_bias:
            rows += [
                layer("mlp.gate_proj.bias", "mlp.gate.b", "F -> F"),
                layer("mlp.up_proj.bias", "mlp.up.b", "F -> F"),
                layer("mlp.down_proj.bias", "mlp.down.b", "D -> D"),
            ]
        if not self.tied:
            rows.append(Row("lm_head.weight", "head.w", "V D -> D V"))
        return rows, self.dims

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "LlamaConfig":
        table = TABLES[config["model_type"]]
        return cls(**table.read(config), rope=Rope(**read_rope(config)))

    def to_hub(self) -> dict[str, Any]:
        """A window is Mistral's, biases are Llama's: transformers has no architecture with both.

        Raises:
            Unsupported: with both, or with interleaved rotary pairs.
        """
        if self.rope.pairs != "halves":
            raise Unsupported("the Hub's Llama turns halves, not interleaved pairs", hint="convert with to=argosy")
        if self.window and (self.attention_bias or self.mlp_bias):
            raise Unsupported(
                "no Hub architecture of this family has a window and biases", hint="convert with to=argosy"
            )
        kind = ("mistral", "MistralForCausalLM") if self.window else ("llama", "LlamaForCausalLM")
        head = {"model_type": kind[0], "architectures": [kind[1]]}
        sizes = {"head_dim": self.H, "num_key_value_heads": self.K}
        return head | TABLES[kind[0]].write(self) | sizes | write_rope(self.rope)


SIZES = [
    ("vocab_size", "vocab"),
    ("hidden_size", "width"),
    ("intermediate_size", "ffn"),
    ("num_hidden_layers", "layers"),
    ("num_attention_heads", "heads"),
    ("num_key_value_heads", "kv_heads"),
    ("head_dim", "head_size"),
    ("max_position_embeddings", "context"),
    ("rms_norm_eps", "norm_eps"),
    ("hidden_act", "activation"),
    ("tie_word_embeddings", "tied"),
]
# By `model_type`, with what transformers takes where a config.json does not say, and what it never reads.
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


class Attention(nnx.Module):
    """softmax(q k' / sqrt(H)) v, queries and keys rotated."""

    def __init__(self, c: LlamaConfig):
        out_scale = (c.heads * c.H * 2 * c.layers) ** -0.5  # the residual stream keeps its variance at any depth
        self.rope, self.score, self.held = c.rope, Score(c.H**-0.5, c.window), (c.K, c.H)
        self.q = Einsum("BTD,DNH->BTNH", c.dims, bias=c.attention_bias)
        self.k = Einsum("BTD,DKH->BTKH", c.dims, bias=c.attention_bias)
        self.v = Einsum("BTD,DKH->BTKH", c.dims, bias=c.attention_bias)
        self.o = Einsum("BTNH,NHD->BTD", c.dims, bias=c.attention_bias, scale=out_scale)

    def holds(self) -> Spec:
        return Spec(token=(("k", self.held), ("v", self.held)), span=self.score.window)

    def __call__(
        self, x: Float[Array, "B T D"], attend: Attend, cache: Cache | None
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        q = rotate(self.q(x), attend.positions, self.rope)
        held = {"k": rotate(self.k(x), attend.positions, self.rope), "v": self.v(x)}
        y, cache = attend(q, held, cache, HEADS, score=self.score)
        return self.o(y), cache


class Block(nnx.Module):
    """Attention, then the feed-forward layer, each on a normalised copy of the residual stream."""

    def __init__(self, c: LlamaConfig):
        self.attn_norm, self.attn = RMSNorm(c.width, c.norm_eps), Attention(c)
        self.mlp_norm, self.mlp = RMSNorm(c.width, c.norm_eps), GLU(c.dims, c.activation, bias=c.mlp_bias)

    def holds(self, each: None) -> Spec:
        return self.attn.holds()

    def __call__(
        self, x: Float[Array, "B T D"], each: None, cache: Cache | None, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Cache | None, dict[str, Array]]:
        y, cache = self.attn(self.attn_norm(x), attend, cache)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache, {}


class Llama(nnx.Module):
    """Tokens to logits. `dtype` is what activations, and so contractions, are computed in."""

    def __init__(self, c: LlamaConfig, run: Run = UNROLL):
        self.config, self.dtype = c, jnp.float32
        self.embed = Einsum("BTV,VD->BTD", c.dims, scale=0.02)
        self.layers = Stack([Layer("block")] * c.layers, lambda kind: Block(c), run=run)
        self.norm = RMSNorm(c.width, c.norm_eps)
        self.head = None if c.tied else Einsum("BTD,DV->BTV", c.dims)

    def hidden(
        self, tokens: Int[Array, "B T"], attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, Told]:
        """What the head reads, the cache after these tokens, and what the layers told."""
        x, cache, told = self.layers(self.embed.take(tokens).astype(self.dtype), cache, attend)
        return on_rows(self.norm(x), self.layers.rows), cache, told

    def unembed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        y = self.embed.via("BTD,VD->BTV", x) if self.head is None else self.head(x)
        return y.astype(jnp.float32)

    def __call__(
        self, tokens: Int[Array, "B T"], attend: Attend, cache: Any = None
    ) -> tuple[Float[Array, "B T V"], Any, Told]:
        x, cache, told = self.hidden(tokens, attend, cache)
        return self.unembed(x), cache, told
