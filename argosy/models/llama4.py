"""Llama 4 (text): layers with rotary positions and chunked attention, layers with full attention and no positions; experts
whose weight scales their input, beside a shared expert.

    h = x + Attention(RMSNorm(x))        y = h + MoE(RMSNorm(h)), in some layers h + SwiGLU(RMSNorm(h))
    MoE(x) = Shared(x) + sum over the k best experts e of  Expert_e(sigmoid(r_e) x),  r = W_r x

Queries and keys of rotary layers may be normalized over each head, without a weight. Queries of the other layers grow with their
position, so that attention over millions of tokens stays sharp. Only the text model of a folder is read.

Meta 2025, "The Llama 4 herd"; Yang et al. 2025 (arXiv:2501.18795) on layers without positions.
B batch, T time, D width, F feed-forward, N query heads, K key heads, H head size, V vocabulary, E experts, M expert ffn.
"""

from functools import partial
from typing import Any, ClassVar

from pydantic import Field, model_validator

from argosy.core.errors import BadInput
from argosy.core.keymap import Row
from argosy.models import hub_rows as hub
from argosy.models import parts
from argosy.models.family import DecoderConfig, shortest_pattern
from argosy.models.hub_config import SIZES, ConfigTable, read_rope, text_of, write_rope
from argosy.models.settings import Experts, Llama3, Reach, Rope, Temper


def block(config: "Llama4Config", kind: str) -> "parts.Block":
    """One layer. kind: "dense" or "experts"."""
    d, bias = config.dims, config.attention_bias
    attention = parts.Attention(d, config.layers, bias=bias, out_bias=bias)
    experts = kind == "experts"
    mlp = parts.MoE(d, config.moe, config.activation) if experts else parts.GLU(d, config.activation)
    return parts.Block(attention, mlp, pre=partial(parts.RMSNorm, config.width, config.norm_eps))


class Llama4Config(DecoderConfig):
    """Llama 4 (text)."""

    hub_types: ClassVar[tuple[str, ...]] = ("llama4_text", "llama4")
    moe_parts: ClassVar[frozenset[str]] = frozenset(["shared"])
    hub_prefixes: ClassVar[tuple[str, ...]] = ("language_model.",)
    hub_left_out: ClassVar[tuple[str, ...]] = ("vision_model.*", "multi_modal_projector.*")
    make: ClassVar[Any] = block

    window: int | None = Field(8192, gt=0)
    """Tokens per chunk: in a local layer, a token attends only to its own chunk."""
    pattern: str | None = "LLLG"
    """Which layers have rotary positions and chunked attention (L), and which have full attention without positions (G), repeated
    up to the last
    layer."""
    rope: Rope = Rope(base=500_000, pairs="interleaved")
    """Rotary positions of local layers."""
    qk_norm: bool = False
    """Divides each head of queries and keys by its RMS after rotary positions, in local layers."""
    temper: Temper | None = None
    """How queries grow with their position, in layers with full attention."""
    attention_bias: bool = False
    """Adds biases to the four projections of attention."""
    moe: Experts
    """The experts."""
    moe_pattern: str = Field("E", pattern="^[DE]+$")
    """Which layers have experts (E) and which a feed-forward layer (D), repeated up to the last layer."""

    @model_validator(mode="after")
    def _has_experts(self) -> "Llama4Config":
        if "experts" not in self.kinds:
            raise ValueError(f"moe_pattern = {self.moe_pattern} leaves none of {self.layers} layers with experts")
        return self

    @classmethod
    def examples(cls) -> dict[str, Any]:
        odd: dict[str, Any] = {"vocab": 113, "width": 44, "ffn": 70, "heads": 4, "context": 200, "window": 7}
        weighed: dict[str, Any] = {"score": "sigmoid", "normalized": False, "weigh": "input"}
        scaled = Rope(base=5e5, pairs="interleaved", scaling=Llama3(factor=16, low=1, high=1, original=16))
        return {
            "experts": cls(
                **odd,
                layers=3,
                kv_heads=1,
                head_size=10,
                pattern="LG",
                attention_bias=True,
                moe=Experts(count=5, active=2, ffn=26, shared=26, **weighed),
            ),
            "interleaved": cls(
                **odd,
                layers=5,
                kv_heads=2,
                head_size=14,
                tied=True,
                rope=scaled,
                qk_norm=True,
                temper=Temper(floor=4, scale=0.3),
                moe=Experts(count=6, active=1, ffn=22, shared=22, **weighed),
                moe_pattern="DE",
            ),
        }

    @property
    def kinds(self) -> list[str]:
        """The feed-forward part of each layer."""
        letters = (self.moe_pattern * self.layers)[: self.layers]
        return ["experts" if letter == "E" else "dense" for letter in letters]

    def reaches(self) -> list[Reach]:
        local = Reach(
            self.window,
            self.rotary(self.rope),
            chunked=True,
            unit=self.norm_eps if self.qk_norm else None,
        )
        return [local if span == "L" else Reach(temper=self.temper) for span in self.spans]

    def hub_rows(self) -> tuple[list[Row], dict[str, int]]:
        over = range(self.layers)
        dense, sparse = ([i for i in over if self.kinds[i] == kind] for kind in ("dense", "experts"))
        rows = hub.attention(over, bias=self.attention_bias, out_bias=self.attention_bias)
        rows += hub.norms(over, hub.PRE_NORMS) + (hub.glu(dense, "feed_forward") if dense else [])
        both = ("layers.{l}.mlp.gate.w", "layers.{l}.mlp.up.w")
        rows.append(Row(f"{hub.LAYER}feed_forward.experts.gate_up_proj", both, "E D (M|M) -> E D M, E D M", sparse))
        rows += hub.of_layers(
            sparse,
            ("feed_forward.router.weight", "mlp.router.w", "E D -> D E"),
            ("feed_forward.experts.down_proj", "mlp.down.w", "E M D -> E M D"),
        )
        rows += hub.glu(sparse, "feed_forward.shared_expert", "mlp.shared", "shared") if self.moe.shared else []
        return rows + hub.ends(self.tied, scores=self.scores), self.dims

    @classmethod
    def hub_text(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Llama 4 is published with a vision tower; `text_config` describes the text model."""
        return text_of(config, "llama4", ARCHITECTURE)

    @classmethod
    def from_hub(cls, config: dict[str, Any]) -> "Llama4Config":
        read: dict[str, Any] = {"window": None} | TABLE.read(config)  # a chunk size of null is none, not ours
        read["moe"] |= FIXED | {"shared": read["moe"]["ffn"]}
        read |= {"pattern": _spans(config, read["layers"]), "moe_pattern": _fed(config, read["layers"])}
        if config.get("attn_temperature_tuning", True):  # the first files say 4, and mean yes
            read["temper"] = Temper(floor=config.get("floor_scale", 8192), scale=config.get("attn_scale", 0.1))
        return cls(**read, rope=Rope(**read_rope(config, 5e5), pairs="interleaved"))

    def to_hub(self) -> dict[str, Any]:
        """The config.json as transformers writes it."""
        written = ARCHITECTURE | TABLE.write(self) | {"num_key_value_heads": self.K, "head_dim": self.H}
        # Transformers requires one even if no layer is local.
        written |= {"attention_chunk_size": self.window or 8192}
        written |= {"no_rope_layers": [int(span == "L") for span in self.spans]}
        written |= {"layer_types": [KINDS[span] for span in self.spans]}
        written |= {"moe_layers": [i for i, kind in enumerate(self.kinds) if kind == "experts"]}
        fed = self.resolved().moe_pattern
        if fed == "E".rjust(len(fed), "D"):  # vLLM reads no list
            written |= {"interleave_moe_layer_step": len(fed)}
        written |= {"attn_temperature_tuning": self.temper is not None}
        if self.temper is not None:
            written |= {"floor_scale": self.temper.floor, "attn_scale": self.temper.scale}
        return self.agreed(written | write_rope(self.rope))

    def resolved(self) -> "Llama4Config":
        fed = "".join("E" if kind == "experts" else "D" for kind in self.kinds)
        return super().resolved().model_copy(update={"moe_pattern": shortest_pattern(fed)})


def _spans(config: dict[str, Any], layers: int) -> str:
    """L or G for each layer. Rotary layers are the chunked ones; a list of kinds must agree with that.

    Raises:
        BadInput: it does not agree, or the lists are shorter than the number of layers.
    """
    every = config.get("no_rope_layer_interval", 4)
    turn = config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(layers)]
    spans = "".join("L" if rotary else "G" for rotary in turn[:layers])
    kinds = config.get("layer_types")
    if len(spans) < layers or (kinds is not None and list(kinds) != [KINDS[span] for span in spans]):
        raise BadInput(
            f"config.json: `no_rope_layers` and `layer_types` do not describe the same {layers} layers",
            hint="only chunked layers with rotary positions and full layers without are built",
        )
    return shortest_pattern(spans)


def _fed(config: dict[str, Any], layers: int) -> str:
    """E or D for each layer: from a list of layers with experts, otherwise every n-th layer has them."""
    named, every = config.get("moe_layers"), config.get("interleave_moe_layer_step", 1)
    has = [(i + 1) % every == 0 if named is None else i in named for i in range(layers)]
    return shortest_pattern("".join("E" if one else "D" for one in has))


ARCHITECTURE = {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]}
KINDS = {"L": "chunked_attention", "G": "full_attention"}
# Facts that the architecture fixes and no key of config.json states.
FIXED: dict[str, Any] = {"score": "sigmoid", "normalized": False, "weigh": "input"}
TABLE = ConfigTable(
    [
        *(row for row in SIZES if row[1] != "ffn"),
        ("intermediate_size_mlp", "ffn"),
        ("intermediate_size", "moe.ffn"),
        ("num_local_experts", "moe.count"),
        ("num_experts_per_tok", "moe.active"),
        ("router_aux_loss_coef", "moe.balance"),
        ("attention_chunk_size", "window"),
        ("attention_bias", "attention_bias"),
        ("use_qk_norm", "qk_norm"),
    ],
    {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
    },
    # All but the last three are read above. No implementation has router noise, and two keys describe how a file was made.
    harmless=frozenset(
        """no_rope_layers no_rope_layer_interval layer_types moe_layers interleave_moe_layer_step attn_temperature_tuning
        floor_scale attn_scale output_router_logits router_jitter_noise for_llm_compressor cache_implementation""".split()  # noqa: SIM905
    ),
)
