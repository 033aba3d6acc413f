"""Llama 4 on the Hub: config.json and tensor names (`models.llama4` has the equations)."""

from typing import Any, ClassVar

from argosy.core.errors import BadInput
from argosy.core.keymap import KeyRow
from argosy.models.base.language import shortest_pattern
from argosy.models.hub import rows as hub
from argosy.models.hub.config import SIZES, ConfigTable, read_rope, text_config, write_rope
from argosy.models.settings import Rope, Temper


class Llama4Hub:
    """A base class of the family's config that reads and writes Hub folders."""

    hub_types: ClassVar[tuple[str, ...]] = ("llama4_text", "llama4")
    hub_prefixes: ClassVar[tuple[str, ...]] = ("language_model.",)
    hub_left_out: ClassVar[tuple[str, ...]] = ("vision_model.*", "multi_modal_projector.*")

    def hub_rows(self: Any) -> tuple[list[KeyRow], dict[str, int]]:
        layers = range(self.layers)
        dense, sparse = ([i for i in layers if self.kinds[i] == kind] for kind in ("dense", "experts"))
        rows = hub.attention_key_rows(layers, bias=self.attention_bias, out_bias=self.attention_bias)
        rows += hub.norms(layers, hub.PRE_NORMS) + (hub.glu(dense, "feed_forward") if dense else [])
        both = ("layers.{l}.mlp.gate.w", "layers.{l}.mlp.up.w")
        rows.append(KeyRow(f"{hub.LAYER}feed_forward.experts.gate_up_proj", both, "E D (M|M) -> E D M, E D M", sparse))
        rows += hub.of_layers(
            sparse,
            ("feed_forward.router.weight", "mlp.router.w", "E D -> D E"),
            ("feed_forward.experts.down_proj", "mlp.down.w", "E M D -> E M D"),
        )
        rows += hub.glu(sparse, "feed_forward.shared_expert", "mlp.shared", "shared") if self.moe.shared else []
        return rows + hub.ends(self.tied, scores=self.scores), self.dims

    @classmethod
    def hub_text(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Returns `text_config` of models with a vision tower, as Llama 4 is published."""
        return text_config(config, "llama4", ARCHITECTURE)

    @classmethod
    def from_hub(cls: Any, config: dict[str, Any]) -> Any:
        read: dict[str, Any] = {"window": None} | TABLE.read(config)  # a chunk size of null means no window, not our default
        read["moe"] |= FIXED | {"shared": read["moe"]["ffn"]}
        read |= {"pattern": _spans(config, read["layers"]), "moe_pattern": _moe_pattern(config, read["layers"])}
        if config.get("attn_temperature_tuning", True):  # the first files have 4 here, which means true
            read["temper"] = Temper(floor=config.get("floor_scale", 8192), scale=config.get("attn_scale", 0.1))
        return cls(**read, rope=Rope(**read_rope(config, 5e5), pairs="interleaved"))

    def to_hub(self: Any) -> dict[str, Any]:
        """Returns config.json as transformers writes it."""
        config = ARCHITECTURE | TABLE.write(self) | {"num_key_value_heads": self.K, "head_dim": self.H}
        # transformers requires a chunk size even if no layer is local.
        config |= {"attention_chunk_size": self.window or 8192}
        config |= {"no_rope_layers": [int(span == "L") for span in self.spans]}
        config |= {"layer_types": [KINDS[span] for span in self.spans]}
        config |= {"moe_layers": [i for i, kind in enumerate(self.kinds) if kind == "experts"]}
        fed = self.resolved().moe_pattern
        if fed == "E".rjust(len(fed), "D"):  # vLLM does not read `moe_layers`
            config |= {"interleave_moe_layer_step": len(fed)}
        config |= {"attn_temperature_tuning": self.temper is not None}
        if self.temper is not None:
            config |= {"floor_scale": self.temper.floor, "attn_scale": self.temper.scale}
        return self.agreed(config | write_rope(self.rope))


def _spans(config: dict[str, Any], layers: int) -> str:
    """Reads the pattern of L (chunked attention, with RoPE) and G (full attention, without).

    Raises:
        BadInput: `layer_types` contradicts the list of layers with RoPE, or a list is shorter than the number of layers.
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


def _moe_pattern(config: dict[str, Any], layers: int) -> str:
    """Reads the pattern of E (experts) and D (dense), from `moe_layers`. Without that list, every n-th layer has experts."""
    sparse, every = config.get("moe_layers"), config.get("interleave_moe_layer_step", 1)
    has = [(i + 1) % every == 0 if sparse is None else i in sparse for i in range(layers)]
    return shortest_pattern("".join("E" if is_sparse else "D" for is_sparse in has))


ARCHITECTURE = {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]}
KINDS = {"L": "chunked_attention", "G": "full_attention"}
# Settings that the architecture fixes, for which config.json has no key.
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
    # All keys but the last three are read above. No implementation has router noise. The other two describe how a file was made.
    harmless=frozenset(
        """no_rope_layers no_rope_layer_interval layer_types moe_layers interleave_moe_layer_step attn_temperature_tuning
        floor_scale attn_scale output_router_logits router_jitter_noise for_llm_compressor cache_implementation""".split()  # noqa: SIM905
    ),
)
